"""The report's section on the task: what the model that training starts from leaves to learn, and to drift in."""

from html import escape
from pathlib import Path

from score_centering.figures.html import table
from score_centering.figures.numerals import percent
from score_centering.precision.registry import UNQUANTISED_PRECISION, precision_labels
from score_centering.settings.inputs import read_json

HEADS = ("Sampled", "On", "Entropy, nats a token", "Response, tokens", "Reward", "Can be answered")


def task(folder: Path) -> str:
    """Entropy, response length and ceiling of the task, by `model/manifest.json` and `precision/gate.json`.

    A row of the warm start's last measurement, in BF16 on training problems, and one of each precision that the
    validation measured, on held-out ones. Nothing is shown of a file that has not measured it.
    """
    warm = read_json(folder / "model" / "manifest.json").get("warm_start") or {}
    numbers = read_json(folder / "precision" / "gate.json")["numbers"]
    rows = []
    if "sampled_entropy" in warm:
        names = ("sampled_entropy", "sampled_response_length", "sampled_reward", "answerable_share")
        rows.append(_row(UNQUANTISED_PRECISION.label, "training problems", *(warm[name] for name in names)))
    for name, label in precision_labels().items():
        if f"{name}.entropy" in numbers:
            entropy, length = numbers[f"{name}.entropy"], numbers[f"{name}.response_length_mean"]
            rows.append(_row(label, "held-out problems", entropy, length, None, numbers["task.answerable_share"]))
    return (
        "<p>What the model that training starts from does at the sampling temperature. Entropy is what a mismatch "
        "needs to drift in; problems that can't be answered, which only a synthetic source has, keep advantages from "
        "vanishing and bound the reward, lucky guesses aside.</p>" + table(HEADS, rows)
    )


def _row(
    label: str, problems: str, entropy: float | None, length: float | None, reward: float | None, ceiling: float
) -> tuple[str, ...]:
    shown = [(entropy, ".2f"), (length, ".1f"), (reward, ".3f")]
    cells = ["–" if value is None else format(value, how) for value, how in shown]
    return escape(label), problems, *cells, percent(ceiling)
