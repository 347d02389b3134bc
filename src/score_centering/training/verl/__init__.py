"""The trainer of full scale: verl 0.8.0 on Ray, driven through its own extension points.

The run loop, objective, advantages, scorer, capture records, metric names and run folder are those of the local
trainer; verl brings the sharded model and optimiser, the Ray workers and the rollout servers. Its files stay as they
are installed: `plugin` enters our classes into its registries.

Files lie by the process that they run in: `driver`, `worker`, `server`. `plugin` is read in all of them, `agent_loop`
runs in verl's agent loop workers, `messages` is what those and the servers say to each other.
"""
