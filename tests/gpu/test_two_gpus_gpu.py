"""verl's path on two GPUs of one host against one: the same update, the same rollouts, the same weights in both
rollout servers, and a killed rank. The checks are those of the CPU's tests; here the ranks speak through NCCL.
"""

import importlib.util
import os
import signal
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from loading import load

if torch.cuda.device_count() < 2 or importlib.util.find_spec("verl") is None:
    pytest.skip("needs two CUDA devices and verl", allow_module_level=True)

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]
TWO, STEPS = "trainer.n_gpus_per_node=2", 10


ENGINE, LOOP = load("unit/training/test_verl_engine.py"), load("workflow/test_verl_loop.py")
# FP32: micro-batches of another size, so other products in another order. BF16: the same micro-batches, so sums of
# gradients in another order; what torch adds atomically may flip a rounding to BF16.
TOLERANCE = {
    "fp32": ENGINE.Tolerance(rtol=1e-3, atol=1e-5, metric=1e-4),
    "bf16": ENGINE.Tolerance(rtol=1e-2, atol=1e-4, metric=1e-3),
}
MICRO_BATCH = {"fp32": (4, 2), "bf16": (2, 2)}  # rollouts on one rank, on each of two


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("loops")
    assert LOOP.finish(LOOP.start(folder, "save", "-", "-"))[0] == 0
    yield folder
    for pid in LOOP.alive(folder):
        os.kill(pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def undisturbed(folder) -> dict[str, subprocess.Popen[str]]:
    """Runs of three steps on one GPU and on two, which go on during the first test."""
    return {
        name: LOOP.start(folder, "verl", "sc", name, *overrides, device="cuda")
        for name, overrides in (("one", ()), ("two", (TWO,)))
    }


def test_a_killed_rank_stops_the_run_which_then_goes_on(folder, undisturbed):
    run = folder / "disturbed"

    def begin() -> subprocess.Popen[str]:
        return LOOP.start(folder, "verl", "sc", run.name, TWO, f"trainer.total_training_steps={STEPS}", device="cuda")

    process = begin()
    LOOP.wait_until(lambda: len(LOOP.steps(run)) >= 2, process, seconds=150)
    ranks = [pid for pid in LOOP.alive(run) if "WorkerDict" in Path(f"/proc/{pid}/cmdline").read_text()]
    assert len(ranks) == 2
    os.kill(max(ranks), signal.SIGKILL)
    code, output = LOOP.finish(process, seconds=60)
    assert code == 2, output
    (line,) = (line for line in output.splitlines() if line.startswith("error: "))
    assert line.startswith("error: a process of Ray failed: ")
    assert "Traceback" not in output
    LOOP.wait_until(lambda: LOOP.gone(run), None, seconds=60)
    assert len(LOOP.steps(run)) <= STEPS

    code, output = LOOP.finish(begin(), seconds=150)
    assert code == 0, output
    assert [record["step"] for record in LOOP.steps(run)] == list(range(STEPS + 1))
    LOOP.wait_until(lambda: LOOP.gone(run), None, seconds=60)


def test_two_servers_sample_what_one_does(folder, undisturbed):
    for process in undisturbed.values():
        code, output = LOOP.finish(process, seconds=150)
        assert code == 0, output
    LOOP.assert_two_servers_sample_what_one_does(folder / "two", folder / "one")
    LOOP.assert_parity(folder / "two", folder / "one")


@pytest.fixture(scope="module")
def updates(tmp_path_factory) -> dict[tuple[str, int], list[dict]]:
    """Every arm's update, by the dtype of the forward and the number of ranks; with one tensor for embedding and LM
    head in FP32 and with two in BF16."""
    folders = {(dtype, ranks): tmp_path_factory.mktemp(f"{dtype}on{ranks}") for dtype in TOLERANCE for ranks in (1, 2)}
    for (dtype, ranks), folder in folders.items():
        arms = ENGINE.cases(MICRO_BATCH[dtype][ranks - 1])
        arms = {arm: arms[arm] for arm in ENGINE.ARMS}
        ENGINE.write_case(folder, arms, ("packed",), dtype, tied=dtype == "fp32")
    with ThreadPoolExecutor(len(folders)) as pool:
        results = pool.map(lambda key: ENGINE.run(folders[key], key[1], "cuda"), folders)
        return dict(zip(folders, results, strict=True))


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_two_ranks_make_the_update_of_one(updates, dtype):
    (one,), ranks = updates[dtype, 1], updates[dtype, 2]
    for arm in ENGINE.ARMS:
        (gradient, metrics), (expected, alone) = ranks[0][arm, "packed"], one[arm, "packed"]
        gap = max(float((gradient[name] - value).norm() / value.norm()) for name, value in expected.items())
        shown = {name: (alone[name], metrics[name]) for name in ("loss", "grad_norm", "k3_kl", "advantage_abs_mean")}
        print(f"{dtype} {arm}: largest relative difference of a tensor's gradient {gap:.2e}; one rank, two: {shown}")
    ENGINE.assert_ranks_make_the_update_of_one(ranks, one, TOLERANCE[dtype])
