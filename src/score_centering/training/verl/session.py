"""Ray for the time of one run, and nothing of it afterwards."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

import ray
from omegaconf import DictConfig, OmegaConf
from verl.trainer.constants_ppo import get_ppo_ray_runtime_env

from score_centering.runs.process import STOP_SIGNALS
from score_centering.settings.stages import TrainStage


@contextmanager
def ray_session(stage: TrainStage, config: DictConfig) -> Iterator[None]:
    """Ray processes of this run alone, or the cluster that RAY_ADDRESS names; ended with the block, however it ends.

    The processes of a local Ray die with this one, even when it is killed: Ray asks the kernel for that.
    """
    variables = get_ppo_ray_runtime_env()["env_vars"] | {
        "OMP_NUM_THREADS": str(stage.runtime.threads),
        "HF_HUB_OFFLINE": "1",
    }
    if stage.runtime.device == "cpu":
        variables["CUDA_VISIBLE_DEVICES"] = ""
    handlers = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    ray.init(
        **OmegaConf.to_container(config.ray_kwargs.ray_init),
        runtime_env={"env_vars": variables},
        include_dashboard=False,
        log_to_driver="SC_RAY_LOGS" in os.environ,
    )
    try:
        for number, handler in handlers.items():  # Ray has put its own in their place
            signal.signal(number, handler)
        yield
    finally:
        ray.shutdown()
