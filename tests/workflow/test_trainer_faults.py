"""Faults of the real local trainer, INT8 rollouts and all: each ends in one line and leaves no half file declared, and
the same command without the fault goes on to the bytes of a run that met none."""

import contextlib
import dataclasses
import json
import os
import resource
import runpy
import shutil
import signal
import sys
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import score_centering.training.local  # noqa: F401  once here, so that every trainer is a fork of milliseconds
from score_centering.data import read_split
from score_centering.model.sources import load_folder
from score_centering.precision.int8 import FORMAT as INT8
from score_centering.runs import PRODUCTS, RunFolder, open_run
from score_centering.runs.lock import in_use
from score_centering.runs.schema import read_metrics
from score_centering.settings.model_blocks import Quantization

pytestmark = pytest.mark.workflow

ROOT = Path(__file__).parents[2]
PROGRAMS = ROOT / "workflow/scripts"
DATASET, MODEL = "results/test/dataset/manifest.json", "results/test/model/manifest.json"
FAULTY_STEP = 3  # of 4; a checkpoint is written after every second one

Hook = Callable[[], None]


def nothing() -> None:
    pass


@dataclasses.dataclass(frozen=True)
class Project:
    """A folder with a configuration and the inputs of a run."""

    folder: Path
    fork: Callable

    def program(self, name: str, *arguments: str, hook: Hook = nothing):
        """Run a program of the pipeline in a child process that calls `hook` first."""

        def child() -> None:
            os.chdir(self.folder)
            torch.set_num_threads(1)
            hook()
            sys.argv = [str(PROGRAMS / name), *arguments, "--configfile", "config/test.yaml"]
            runpy.run_path(str(PROGRAMS / name), run_name="__main__")

        return self.fork(child)

    def train(self, run_dir: str | Path, *overrides: str, hook: Hook = nothing):
        return self.program("train.py", "--baseline", "sc", "--run-dir", str(run_dir), *overrides, hook=hook)

    def path(self, run_dir: str) -> Path:
        return self.folder / run_dir


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory, fork) -> Project:
    folder = tmp_path_factory.mktemp("project")
    shutil.copytree(ROOT / "config", folder / "config")
    project = Project(folder, fork)
    for name, options in {
        "dataset.py": ["--output-dir", "results/test/dataset"],
        "model.py": ["--dataset-manifest", DATASET, "--output-dir", "results/test/model/base", "--manifest", MODEL],
    }.items():
        ended = project.program(name, *options)
        assert ended.code == 0, ended.stderr
    load_folder(folder / "results/test/model/base")  # imports the rest of transformers, here and not in every fork
    read_split(folder / DATASET, "test")
    # What llm-compressor would write of it, as far as the engine reads it: which layers run in INT8.
    listed = INT8.quantization_config(Quantization().targets, Quantization().ignore)
    (folder / "results/test/model/w8a8").mkdir()
    (folder / "results/test/model/w8a8/config.json").write_text(json.dumps({"quantization_config": listed}))
    return project


@pytest.fixture(scope="module")
def undisturbed(project: Project) -> bytes:
    """metrics.parquet of a run that meets no fault."""
    ended = project.train("undisturbed")
    assert ended.code == 0, ended.stderr
    return (project.path("undisturbed") / "metrics.parquet").read_bytes()


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A place of its own for every test's run, with everything in its name that shells and globs trip over."""
    return tmp_path / 'it\'s a "run" – ünï $(x); [a]*' / "seed0"


def in_step(step: int, call: Callable[[], None], phase: str = "update") -> Hook:
    """A hook that calls `call` in the trainer when it enters `phase` of `step`."""

    def hook() -> None:
        entered, original = [0], RunFolder.phase

        def entering(self: RunFolder, name: str) -> None:
            original(self, name)
            entered[0] += name == phase
            if name == phase and entered[0] == step:
                call()

        RunFolder.phase = entering

    return hook


def replace_in(module: str, name: str, make: Callable[[Callable], Callable]) -> None:
    """Put `make(original)` in place of `module`.`name`, a dotted path."""
    target = sys.modules[module]
    *path, last = name.split(".")
    for part in path:
        target = getattr(target, part)
    setattr(target, last, make(getattr(target, last)))


def faulty(module: str, name: str, change: Callable, call: int = FAULTY_STEP) -> Hook:
    """A hook: the result of the `call`-th call of `module`.`name` passes through `change`."""

    def make(original: Callable) -> Callable:
        count = [0]

        def replaced(*arguments, **options):
            count[0] += 1
            result = original(*arguments, **options)
            return change(result) if count[0] == call else result

        return replaced

    return lambda: replace_in(module, name, make)


def raising(error: BaseException) -> Callable:
    def change(result):
        raise error

    return change


def nan_loss(result):
    bad = float("nan")
    return dataclasses.replace(result, loss=result.loss * bad, sums={**result.sums, "loss": result.sums["loss"] * bad})


def infinite_loss(result):
    bad = float("inf")
    return dataclasses.replace(result, loss=result.loss * bad, sums={**result.sums, "loss": result.sums["loss"] * bad})


def infinite_gradient(result):
    return dataclasses.replace(result, loss=result.loss * 3e38 * 3e38)


def nan_reward(result):
    rewards = result.rewards.copy()
    rewards[5] = float("nan")
    return dataclasses.replace(result, rewards=rewards)


def nan_logprob(rollouts):
    logprobs = rollouts[6].logprobs.copy()
    logprobs[1] = float("nan")
    return [*rollouts[:6], dataclasses.replace(rollouts[6], logprobs=logprobs), *rollouts[7:]]


LOSS = ("score_centering.training.update", "policy_loss_from_hidden")
SCORE = ("score_centering.reward.scorer", "Scorer.score")
GENERATE = ("score_centering.rollout.local.local_engine", "LocalEngine.generate")
UPDATE = ("score_centering.training.update", "Updater.update")
LOST = "CUDA error: unspecified launch failure\nCUDA kernel errors might be asynchronously reported\n"
# Scoring and generating also happen in the validation, greedy and clean, before the first step and after the second.
AFTER_VALIDATIONS = FAULTY_STEP + 4

FAULTS = {
    "NaN loss": (faulty(*LOSS, nan_loss), "step 3: loss is nan and gradient norm "),
    "infinite loss": (faulty(*LOSS, infinite_loss), "step 3: loss is "),
    "infinite gradient": (faulty(*LOSS, infinite_gradient), "step 3: loss is "),
    "NaN reward": (
        faulty(*SCORE, nan_reward, AFTER_VALIDATIONS),
        "step 3: advantages: the reward of rollout 5 (group 1) is nan; rewards must be finite; the last checkpoint",
    ),
    "NaN log-prob of the sampler": (
        faulty(*GENERATE, nan_logprob, AFTER_VALIDATIONS),
        "rollout (prompt 1, sample 2), position 1: log-prob of the sampled token is not finite",
    ),
    "lost GPU": (
        faulty(*UPDATE, raising(torch.AcceleratorError(LOST))),
        "the GPU failed (CUDA error: unspecified launch failure); the last checkpoint is kept",
    ),
    "full GPU": (
        faulty(*UPDATE, raising(torch.OutOfMemoryError("CUDA out of memory"))),
        "the GPU is out of memory: lower ",
    ),
    "full disk": (
        in_step(2, lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000)), "metrics"),
        "tensors.safetensors: file too large; raise the file-size limit",
    ),
}


GO_ON = ("NaN loss", "NaN reward", "lost GPU", "full disk")  # the others go the same way: not each is tried again


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_one_line_and_the_same_command_goes_on(project, undisturbed, run_dir, name):
    hook, line = FAULTS[name]
    ended = project.train(run_dir, hook=hook)
    assert ended.code == 2, ended.stderr
    errors = [text for text in ended.stderr.splitlines() if text.startswith("error: ")]
    assert len(errors) == 1 and ended.stderr.splitlines()[-1] == errors[0]
    assert line in errors[0]
    assert "Traceback" not in ended.stderr
    assert os.listdir(run_dir) == ["state"]
    assert not in_use(run_dir / "state/lock")
    if name not in GO_ON:
        return
    again = project.train(run_dir)
    assert again.code == 0, again.stderr
    assert "resuming after step 2" in again.stderr or name == "full disk"
    assert (run_dir / "metrics.parquet").read_bytes() == undisturbed


def test_a_stale_sampler_comes_back_with_the_checkpoint_that_lies_between_two_syncs(project, run_dir):
    """The fault is in step 3: the checkpoint is of step 2, the sampler's weights are those of the start."""
    stale = ("trainer.sync_every=3", "trainer.total_training_steps=5")
    ended = project.train(run_dir.with_name("whole"), *stale)
    assert ended.code == 0, ended.stderr
    assert project.train(run_dir, *stale, hook=faulty(*LOSS, nan_loss)).code == 2
    (manifest,) = (run_dir / "state/checkpoints").glob("*/checkpoint.json")
    assert json.loads(manifest.read_text())["scalars"]["sampler_step"] == 0
    again = project.train(run_dir, *stale)
    assert again.code == 0 and "resuming after step 2" in again.stderr, again.stderr
    expected = run_dir.with_name("whole") / "metrics.parquet"
    assert (run_dir / "metrics.parquet").read_bytes() == expected.read_bytes()
    assert read_metrics(expected)["sampler_age"].to_pylist() == [None, 0, 1, 2, 0, 1]


@pytest.mark.parametrize("change", [nan_loss, infinite_gradient])
def test_a_skipped_update_is_counted(project, run_dir, change):
    ended = project.train(run_dir, "trainer.nonfinite=skip", hook=faulty(*LOSS, change))
    assert ended.code == 0, ended.stderr
    metrics = read_metrics(run_dir / "metrics.parquet").to_pydict()
    row = metrics["step"].index(FAULTY_STEP)
    assert metrics["nonfinite_updates"][row] == 1
    assert metrics["loss"][row] is None and metrics["grad_norm"][row] is None
    assert [count for count in metrics["nonfinite_updates"] if count] == [1]
    assert metrics["loss"][row + 1] is not None


def test_weights_that_diverge_end_in_one_line(project, run_dir):
    # An enormous rate alone leaves all logits at 0, which is finite: the norms divide by what has overflowed.
    optim = "actor_rollout_ref.actor.optim"
    ended = project.train(run_dir, f"{optim}.lr=1e30", f"{optim}.weight_decay=1e7")
    assert ended.code == 2, ended.stderr
    assert ended.stderr.splitlines()[-1].startswith("error: ") and "Traceback" not in ended.stderr
    assert os.listdir(run_dir) == ["state"]


def test_a_scoring_process_that_dies_costs_its_answer_and_is_counted(project, run_dir):
    def hook() -> None:
        def send_and_die(original):
            sent = [0]

            def send(self, request):
                sent[0] += 1
                taken = original(self, request)
                if sent[0] == 1:
                    self.process.kill()
                return taken

            return send

        module = "score_centering.reward.scorer"
        replace_in(module, "literals_equal", lambda _: lambda answer, gold: None)  # no answer is judged in the trainer
        replace_in(module, "_Worker.send", send_and_die)

    ended = project.train(run_dir, "trainer.val_before_train=false", hook=hook)
    assert ended.code == 0, ended.stderr
    errors = read_metrics(run_dir / "metrics.parquet")["scorer_errors"].to_pylist()
    assert sum(errors) >= 1


def test_an_engine_that_dies_leaves_nothing_declared(project, run_dir):
    ended = project.train(run_dir, hook=faulty(*GENERATE, raising(RuntimeError("worker died")), AFTER_VALIDATIONS))
    assert ended.code != 0 and "worker died" in ended.stderr
    assert os.listdir(run_dir) == ["state"] and not in_use(run_dir / "state/lock")


def test_a_clock_that_goes_backwards_changes_no_metric(project, undisturbed, run_dir):
    def hook() -> None:
        now = [datetime(2031, 1, 1, tzinfo=UTC)]

        class Backwards(datetime):
            @classmethod
            def now(cls, tz=None):
                now[0] -= timedelta(hours=1)
                return now[0]

        replace_in("score_centering.training.loop", "datetime", lambda _: Backwards)
        replace_in(
            "time", "time", lambda _: lambda: (Backwards.now() - datetime(1970, 1, 1, tzinfo=UTC)).total_seconds()
        )

    ended = project.train(run_dir, hook=hook)
    assert ended.code == 0, ended.stderr
    assert (run_dir / "metrics.parquet").read_bytes() == undisturbed
    timing = pq.read_table(run_dir / "timing.parquet").to_pydict()
    assert timing["started_at"] == sorted(timing["started_at"], reverse=True)
    assert min(timing["step_s"]) > 0


@pytest.mark.parametrize(
    ("number", "phase"),
    [
        (signal.SIGINT, "rollout"),
        (signal.SIGTERM, "update"),
        (signal.SIGUSR1, "metrics"),
        (signal.SIGUSR2, "reward"),
    ],
)
def test_a_stop_signal_ends_in_a_checkpoint_and_code_75(project, undisturbed, run_dir, number, phase):
    ended = project.train(run_dir, hook=in_step(3, lambda: os.kill(os.getpid(), number), phase))
    assert ended.code == 75, ended.stderr
    assert f"{number.name}: stopped after step" in ended.stderr
    assert os.listdir(run_dir) == ["state"]
    assert project.train(run_dir).code == 0
    assert (run_dir / "metrics.parquet").read_bytes() == undisturbed


def test_ctrl_c_twice_ends_at_once(project, undisturbed, run_dir):
    def twice() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    ended = project.train(run_dir, hook=in_step(3, twice))
    assert ended.code == 130, ended.stderr
    assert ended.stderr.splitlines()[-1] == "error: interrupted"
    assert project.train(run_dir).code == 0
    assert (run_dir / "metrics.parquet").read_bytes() == undisturbed


def test_a_forced_start_trains_afresh_to_the_same_bytes(project, undisturbed, run_dir):
    assert project.train(run_dir).code == 0
    again = project.train(run_dir, "--afresh")
    assert again.code == 0 and "training starts afresh" in again.stderr
    assert (run_dir / "metrics.parquet").read_bytes() == undisturbed


def test_a_second_start_is_refused_with_pid_and_host(project, run_dir):
    identity = json.loads((project.path("undisturbed") / "run.json").read_text())["identity"]
    with open_run(run_dir, identity):
        ended = project.train(run_dir)
    assert ended.code == 2
    assert f"is in use by process {os.getpid()} on {os.uname().nodename};" in ended.stderr.splitlines()[-1]


def break_bytes(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 255
    path.write_bytes(content)


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 100)


def wrong_types(path: Path) -> None:
    pq.write_table(pa.table({name: pa.array([1, 2]) for name in ("prompt", "answer", "id", "source")}), path)


@pytest.mark.parametrize(
    ("path", "change", "line"),
    [
        ("dataset/manifest.json", Path.unlink, "dataset/manifest.json: No such file"),
        ("model/manifest.json", Path.unlink, "model/manifest.json: No such file"),
        ("model/w8a8/config.json", Path.unlink, "model/w8a8/config.json: cannot read this input of the run: no such"),
        ("model/w8a8/config.json", lambda path: path.write_text("{"), "model/w8a8/config.json: not valid JSON"),
        ("dataset/train.parquet", break_bytes, "dataset/train.parquet: sha256 "),
        ("dataset/test.parquet", Path.unlink, "dataset/test.parquet: missing"),
        ("model/base/model.safetensors", break_bytes, "model/base/model.safetensors: sha256 "),
    ],
)
def test_a_damaged_input_is_named(project, tmp_path, run_dir, path, change, line):
    other = Project(tmp_path / "other", project.fork)
    shutil.copytree(project.folder, other.folder, ignore=shutil.ignore_patterns("undisturbed"))
    change(other.path(f"results/test/{path}"))
    ended = other.train(run_dir)
    assert ended.code == 2, ended.stderr
    assert ended.stderr.splitlines()[-1].startswith(f"error: results/test/{line}"), ended.stderr
    assert not run_dir.exists() or os.listdir(run_dir) == ["state"]


@pytest.mark.parametrize("change", [cut, wrong_types, Path.unlink])
def test_a_given_file_that_is_no_dataset_is_named(project, tmp_path, run_dir, change):
    given = tmp_path / "it's – given.parquet"
    shutil.copy(project.path("results/test/dataset/train.parquet"), given)
    change(given)
    ended = project.train(run_dir, "--train-file", str(given))
    assert ended.code == 2, ended.stderr
    assert str(given) in ended.stderr.splitlines()[-1] and "Traceback" not in ended.stderr
    assert not run_dir.exists()


def test_nothing_is_written_outside_of_the_run_folder(project, run_dir):
    seen: list[str] = []
    record = run_dir.parent.parent / "written.json"

    def hook() -> None:
        events = {"os.mkdir": (0,), "os.rename": (0, 1), "os.remove": (0,), "os.rmdir": (0,), "os.symlink": (1,)}
        events |= {"os.link": (1,), "os.truncate": (0,), "shutil.rmtree": (0,)}

        def audit(event: str, arguments: tuple) -> None:
            if event == "open":
                path, _, flags = arguments
                if isinstance(path, str | bytes | os.PathLike) and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
                    seen.append(os.path.abspath(os.fsdecode(path)))
            for place in events.get(event, ()):
                if isinstance(arguments[place], str | bytes | os.PathLike):
                    seen.append(os.path.abspath(os.fsdecode(arguments[place])))

        original = os._exit

        def leave(code: int) -> None:
            with contextlib.suppress(OSError):
                record.write_text(json.dumps(seen))
            original(code)

        os._exit = leave
        sys.addaudithook(audit)

    assert project.train(run_dir, hook=hook).code == 0
    written = {path for path in json.loads(record.read_text()) if path not in (os.devnull, str(record))}
    inside = {path for path in written if Path(path).is_relative_to(run_dir.parent)}
    assert written - inside == set()
    assert {str(run_dir / name) for name in PRODUCTS} <= inside
