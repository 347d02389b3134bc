"""Where the runs of an experiment stand, read from their append-only logs. Writes nothing."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.progress_bar import ProgressBar
from rich.table import Table

from score_centering.runs.folder import read_phase
from score_centering.runs.lock import in_use, read_owner
from score_centering.runs.log import read_log
from score_centering.settings.inputs import read_json

RECENT_STEPS = 10  # rewards, K3 and speed are means over these
QUIET_S = 60.0  # a run whose phase has not changed for so long is asked whether its process still lives


@dataclass(frozen=True)
class Status:
    """One run. Rewards and K3 are means over its last steps; None before its first one."""

    arm: str
    seed: int
    state: str  # a phase of the running trainer, or "finished", "stopped", "killed"
    step: int
    total: int
    reward: float | None
    k3: float | None
    tokens_per_s: float | None
    seconds_left: float | None


def run_status(run_dir: Path, now: float) -> Status:
    """`run_dir` is <arm>/seed<k> with a state/identity.json; `now` is a time.time()."""
    state = run_dir / "state"
    identity = read_json(state / "identity.json")
    total = int(identity["config"]["trainer"]["total_training_steps"])
    log = state / "steps.log"
    records = [record for record in (read_log(log) if log.exists() else []) if record["step"] > 0]
    metrics = [record["metrics"] for record in records]
    step = records[-1]["step"] if records else 0
    step_s = _recent([record["timing"] for record in records], "step_s")
    return Status(
        identity["arm"],
        identity["seed"],
        _state(run_dir, now),
        step,
        total,
        _recent(metrics, "reward_mean"),
        _recent(metrics, "k3_kl"),
        _recent([record["timing"] for record in records], "tokens_per_s"),
        None if step_s is None else step_s * (total - step),
    )


def experiment_status(folder: Path, now: float) -> list[Status]:
    """Every run below `folder`/runs that has begun, in order of arm and seed."""
    found = (run_status(path.parent.parent, now) for path in folder.glob("runs/*/seed*/state/identity.json"))
    return sorted(found, key=lambda status: (status.arm, status.seed))


def table(statuses: list[Status]) -> Table:
    """For a terminal."""
    result = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("Arm", "Seed", "State", "Step", ""):
        result.add_column(name, justify="right" if name in ("Seed", "Step") else "left")
    for name in ("Reward", "K3", "Tokens/s", "Left"):
        result.add_column(name, justify="right")
    for status in statuses:
        result.add_row(
            status.arm,
            str(status.seed),
            status.state,
            f"{status.step}/{status.total}",
            ProgressBar(total=status.total, completed=status.step, width=20),
            *_numbers(status),
        )
    return result


def line(status: Status) -> str:
    """For a log."""
    reward, k3, speed, left = _numbers(status)
    return (
        f"{status.arm} seed {status.seed}  {status.state}  step {status.step}/{status.total}  reward {reward}  "
        f"K3 {k3}  {speed} tokens/s  {left} left"
    )


def duration(seconds: float) -> str:
    """Whole seconds, minutes and hours: 3725 is "1:02:05", 65 is "1:05"."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def _state(run_dir: Path, now: float) -> str:
    state = run_dir / "state"
    if (state / "PUBLISHED").exists():
        return "finished"
    if read_owner(state / "lock") is None:
        return "stopped"
    phase = read_phase(run_dir)
    # Asking takes the lock for an instant, in which a trainer that starts would find it taken: so only a silent run is.
    if phase and now - (state / "phase").stat().st_mtime > QUIET_S and not in_use(state / "lock"):
        return "killed"
    return phase.name if phase else "start"


def _recent(rows: list[dict], name: str) -> float | None:
    values = [row[name] for row in rows[-RECENT_STEPS:] if row.get(name) is not None]
    return float(np.mean(values)) if values else None


def _numbers(status: Status) -> tuple[str, str, str, str]:
    ongoing = status.state not in ("finished", "stopped", "killed") and status.seconds_left is not None
    return (
        "–" if status.reward is None else f"{status.reward:.3f}",
        "–" if status.k3 is None else f"{status.k3:.1e}",
        "–" if status.tokens_per_s is None else f"{status.tokens_per_s:.0f}",
        duration(status.seconds_left) if ongoing else "–",
    )


def changes(before: list[Status], after: list[Status]) -> list[Status]:
    """The runs that are new, have a new step, or have ended since."""
    ended = ("finished", "stopped", "killed")
    known = {(status.arm, status.seed): (status.step, status.state in ended) for status in before}
    return [s for s in after if known.get((s.arm, s.seed)) != (s.step, s.state in ended)]
