"""What a person sees while a run goes on: a bar on a terminal, plain lines in a log."""

import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


@contextmanager
def progress(arm: str, first_step: int, total_steps: int) -> Iterator[Any]:
    """Yields `show(step, metrics, timing)`, to be called once a step; output goes to stderr."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _plain(arm, first_step, total_steps)
        return
    columns = (
        TextColumn("[bold]{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[numbers]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as bar:
        task = bar.add_task(arm, total=total_steps, completed=first_step, numbers="")

        def show(step: int, metrics: Mapping[str, Any], timing: Mapping[str, Any]) -> None:
            bar.update(task, completed=step, numbers=_numbers(metrics, timing))

        yield show


def _plain(arm: str, first_step: int, total_steps: int) -> Any:
    started = time.monotonic()

    def show(step: int, metrics: Mapping[str, Any], timing: Mapping[str, Any]) -> None:
        left = (time.monotonic() - started) / max(1, step - first_step) * (total_steps - step)
        line = f"{arm}  step {step}/{total_steps}  {_numbers(metrics, timing)}  {left:.0f} s left"
        print(line, file=sys.stderr, flush=True)

    return show


def _numbers(metrics: Mapping[str, Any], timing: Mapping[str, Any]) -> str:
    parts = []
    if "reward_mean" in metrics:
        parts += [
            f"reward {metrics['reward_mean']:.3f}",
            f"K3 {metrics.get('k3_kl', float('nan')):.2e}",
            f"{timing['tokens_per_s']:.0f} tokens/s",
        ]
    if metrics.get("val_reward_mean") is not None:
        parts.append(f"validation {metrics['val_reward_mean']:.3f}")
    return "  ".join(parts)
