"""Ray for the time of one run, and nothing of it afterwards."""

import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import ray
from omegaconf import DictConfig, OmegaConf
from verl.trainer.constants_ppo import get_ppo_ray_runtime_env

from score_centering.runs.files import make_folder, write_file
from score_centering.runs.process import STOP_SIGNALS
from score_centering.settings import UserError
from score_centering.settings.stages import TrainStage
from score_centering.training.device import leased_gpus

# Nothing is reported anywhere, and a machine that is busy with other work may start Ray's processes slowly.
RAY_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_agent_register_timeout_ms": "600000",
    "RAY_worker_register_timeout_seconds": "600",
    "RAY_raylet_start_wait_time_s": "600",
}


@contextmanager
def ray_session(stage: TrainStage, config: DictConfig) -> Iterator[None]:
    """Ray processes of this run alone, or the cluster that RAY_ADDRESS names; ended with the block, however it ends.

    The processes of a local Ray die with this one, even when it is killed: Ray asks the kernel for that. Their logs
    are in Ray's session folder while they run; the log folder (SC_LOG_DIR, by default one of its own in the temporary
    folder) gets the resolved configuration at the start and those logs at the end.

    Raises:
        UserError: a Ray process failed, with its own last words and the folder of its log.
    """
    variables = get_ppo_ray_runtime_env()["env_vars"] | {
        "OMP_NUM_THREADS": str(stage.runtime.threads),
        "HF_HUB_OFFLINE": "1",
    }
    if stage.runtime.device == "cpu":
        variables["CUDA_VISIBLE_DEVICES"] = ""
    elif "RAY_ADDRESS" not in os.environ:
        os.environ["CUDA_VISIBLE_DEVICES"] = leased_gpus(stage.trainer.n_gpus_per_node)
    folder = log_folder()
    make_folder(folder)
    write_file(folder / "verl.yaml", OmegaConf.to_yaml(config, sort_keys=True).encode())
    for name, value in RAY_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    handlers = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    ray.init(
        **OmegaConf.to_container(config.ray_kwargs.ray_init),
        runtime_env={"env_vars": variables},
        include_dashboard=False,
        log_to_driver=False,
    )
    logs = Path(ray._private.worker._global_node.get_logs_dir_path())
    try:
        for number, handler in handlers.items():  # Ray has put its own in their place
            signal.signal(number, handler)
        yield
    except ray.exceptions.RayError as error:
        cause = [line for line in str(error).splitlines() if line.strip()][-1].strip()
        raise UserError(f"a process of Ray failed: {cause}; the last checkpoint is kept, logs are in {logs}") from error
    finally:
        ray.shutdown()
        if logs.is_dir():
            shutil.copytree(logs, folder / "ray", dirs_exist_ok=True)


def log_folder() -> Path:
    default = f"score-centering-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    return Path(os.environ.get("SC_LOG_DIR") or Path(tempfile.gettempdir()) / default)
