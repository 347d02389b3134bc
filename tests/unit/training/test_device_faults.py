"""A GPU that is lost or full ends a run in one line, and with its lock released."""

from types import SimpleNamespace

import pytest
import torch

from score_centering.runs import make_identity, open_run
from score_centering.runs.lock import in_use
from score_centering.settings import UserError
from score_centering.training.device import device_name, gpu_faults, lease, leased_gpus

LOST = "CUDA error: unspecified launch failure\nCUDA kernel errors might be asynchronously reported\n"


@pytest.mark.parametrize(
    ("error", "phrase"),
    [
        (torch.AcceleratorError(LOST), r"the GPU failed \(CUDA error: unspecified launch failure\)"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), "the GPU is out of memory: lower "),
    ],
)
def test_a_failing_gpu_is_one_line(tmp_path, error, phrase):
    identity = make_identity("tiny", "sc", 0, {}, "cpu", 1)
    with pytest.raises(UserError, match=phrase) as caught, gpu_faults(), open_run(tmp_path, identity) as run:
        run.resume()
        run.record_step(1, {"loss": 1.0}, {})
        raise error
    assert "\n" not in str(caught.value) and "last checkpoint is kept" in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["state"]
    assert not in_use(tmp_path / "state" / "lock")


def test_a_gpu_that_is_not_there_is_one_line(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match="torch sees no CUDA device"):
        device_name("cuda")
    monkeypatch.setenv("SC_GPU", "first")
    with pytest.raises(UserError, match="SC_GPU = 'first': must be the index"):
        lease("cuda")


@pytest.fixture
def four_gpus(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid=f"uuid-{index}"))
    monkeypatch.setenv("SC_GPU", "1")
    return monkeypatch


def test_several_gpus_are_all_held(four_gpus):
    with lease("cuda", 2):
        for index, free in ((0, True), (1, False), (2, False), (3, True)):
            four_gpus.setenv("SC_GPU", str(index))
            if free:
                with lease("cuda"):
                    pass
            else:
                with pytest.raises(UserError, match=f"GPU uuid-{index} is in use"), lease("cuda"):
                    pass


@pytest.mark.parametrize(
    ("first", "count", "visible", "given"),
    [
        (None, 1, None, "0"),
        ("2", 2, None, "2,3"),
        ("1", 2, "4,5,6,7", "5,6"),
        ("0", 1, "GPU-a,GPU-b", "GPU-a"),
        ("3", 1, "", "3"),
    ],
)
def test_ray_sees_the_gpus_that_are_held(monkeypatch, first, count, visible, given):
    """Those from SC_GPU on, counted among those that CUDA_VISIBLE_DEVICES shows."""
    for name, value in (("SC_GPU", first), ("CUDA_VISIBLE_DEVICES", visible)):
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)
    assert leased_gpus(count) == given


def test_more_gpus_than_there_are_is_one_line(four_gpus):
    with pytest.raises(UserError, match=r"^trainer\.n_gpus_per_node = 4: torch sees 4 GPUs, of which SC_GPU = 1 is"):
        lease("cuda", 4)


@pytest.mark.parametrize("places", ["0", "two", "-1"])
def test_places_on_a_gpu_are_a_positive_number(monkeypatch, places):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("SC_RUNS_PER_GPU", places)
    with pytest.raises(UserError, match=f"SC_RUNS_PER_GPU = '{places}': must be a positive number of runs"):
        lease("cuda")
