"""Which device a run trains on, and its lease."""

import os
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

import torch

from score_centering.runs import gpu_lease
from score_centering.settings import UserError


def device_name(device: str) -> str:
    """The kind of device, part of a run's identity: "cpu", or the GPU's product name.

    Raises:
        UserError: `cuda` is asked for and torch sees no GPU.
    """
    if device == "cpu":
        return "cpu"
    if not torch.cuda.is_available():
        raise UserError("runtime.device = 'cuda': torch sees no CUDA device (cpu is the other choice)")
    return torch.cuda.get_device_name()


def lease(device: str, gpus: int = 1) -> AbstractContextManager[None]:
    """Selects the GPU that `SC_GPU` names (default 0, among those torch sees) and holds it, or `gpus` of them from it
    on, which is what verl takes of a node; nothing to do on a CPU.

    `SC_RUNS_PER_GPU` (default 1) is how many runs may share that GPU.

    Raises:
        UserError: `SC_GPU` is no index of a GPU, `SC_RUNS_PER_GPU` no positive number, or other runs hold that GPU.
    """
    if device == "cpu":
        return nullcontext()
    index, count = os.environ.get("SC_GPU", "0"), torch.cuda.device_count()
    if not index.isdecimal() or int(index) >= count:
        raise UserError(f"SC_GPU = {index!r}: must be the index of one of the {count} GPUs that torch sees")
    if int(index) + gpus > count:
        raise UserError(
            f"trainer.n_gpus_per_node = {gpus}: torch sees {count} GPUs, of which SC_GPU = {index} is the first to use"
        )
    places = os.environ.get("SC_RUNS_PER_GPU", "1")
    if not places.isdecimal() or int(places) < 1:
        raise UserError(f"SC_RUNS_PER_GPU = {places!r}: must be a positive number of runs")
    torch.cuda.set_device(int(index))
    uuids = [str(torch.cuda.get_device_properties(int(index) + offset).uuid) for offset in range(gpus)]
    return _all_of(gpu_lease(uuid, int(places)) for uuid in uuids)


def leased_gpus(count: int) -> str:
    """`count` GPUs from the one that `SC_GPU` names on, as CUDA_VISIBLE_DEVICES says it: Ray would take the first ones
    that it sees."""
    first, visible = int(os.environ.get("SC_GPU", "0")), os.environ.get("CUDA_VISIBLE_DEVICES")
    return ",".join(visible.split(",")[first : first + count] if visible else map(str, range(first, first + count)))


@contextmanager
def _all_of(leases: Iterable[AbstractContextManager[None]]) -> Iterator[None]:
    with ExitStack() as stack:
        for one in leases:
            stack.enter_context(one)
        yield


@contextmanager
def gpu_faults() -> Iterator[None]:
    """Turn a GPU that fails, or runs out of memory, inside the block into one line."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise UserError(
            "the GPU is out of memory: lower actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu or "
            "actor_rollout_ref.rollout.max_num_seqs; the last checkpoint is kept"
        ) from error
    except torch.AcceleratorError as error:
        raise UserError(
            f"the GPU failed ({str(error).splitlines()[0]}); the last checkpoint is kept, "
            "the same command goes on from it once the GPU is back"
        ) from error
