"""Chat Completions as a rollout: the gateway in front of a server, a server over the local engine, and an agent."""
