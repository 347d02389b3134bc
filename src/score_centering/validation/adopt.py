"""From measurements of one model to its limits."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from score_centering.settings import UserError
from score_centering.settings.inputs import read_json

EXACT = ("checkpoint.quantised_layers",)
AT_LEAST = ("top1_agreement", "greedy_answer_agreement", "checkpoint.quantised_weight_share")
AT_MOST = (
    "weights.relative",
    "weights.channel_max",
    "kv.key_relative",
    "kv.value_relative",
    "abs_logprob_gap_mean",
    "abs_logprob_gap_p95",
    "k3_kl",
    "emulation.abs_logprob_gap_mean",
)
FIRST = 2.0  # how far from a single measurement its limit lies, whose spread nobody knows yet


def read_measurements(paths: Sequence[Path]) -> tuple[str, list[dict[str, float | None]]]:
    """(name of the model, numbers of each file) of gate.json files of one model.

    Raises:
        UserError: a file that is no gate.json of the precision gate, or files of several models.
    """
    gates = {path: read_json(path) for path in paths}
    for path, gate in gates.items():
        if not isinstance(gate.get("model"), str) or not isinstance(gate.get("numbers"), dict):
            raise UserError(f"{path}: not the gate.json of a precision gate: it names no model; run the gate again")
    names = sorted({gate["model"] for gate in gates.values()})
    if len(names) > 1:
        raise UserError(f"these files are of several models: {', '.join(names)}; limits belong to one")
    return names[0], [gate["numbers"] for gate in gates.values()]


def limits_of(measurements: Sequence[Mapping[str, float | None]]) -> dict[str, dict[str, float]]:
    """Limits by the number's name: the range of several measurements widened by its own width, or twice the error of a
    single one. A number that any of them lacks gets none.

    >>> limits_of([{"int8.k3_kl": 0.002, "int8.top1_agreement": 0.98, "int8.positions": 70.0}])
    {'int8.k3_kl': {'max': 0.004}, 'int8.top1_agreement': {'min': 0.96}}
    >>> limits_of([{"int8.k3_kl": 0.002}, {"int8.k3_kl": 0.003}])
    {'int8.k3_kl': {'max': 0.004}}
    """
    found = {}
    for name in measurements[0]:
        _, _, number = name.partition(".")
        values = [measured.get(name) for measured in measurements]
        present = [value for value in values if value is not None]
        if len(present) < len(values):
            continue
        if number in EXACT:
            found[name] = {"min": min(present), "max": max(present)}
        elif number in AT_MOST:
            found[name] = {"max": _rounded(_beyond(max(present), min(present), 0.0))}
        elif number in AT_LEAST:
            found[name] = {"min": max(0.0, _rounded(_beyond(min(present), max(present), 1.0)))}
    return found


def _beyond(end: float, other: float, perfect: float) -> float:
    """The limit beyond the worst value `end`; `perfect` is the value without any error."""
    return perfect + (end - perfect) * FIRST if end == other else end + (end - other)


def _rounded(value: float) -> float:
    return float(f"{value:.3g}")


def preset(model: str, limits: Mapping[str, Any], count: int) -> str:
    """The limits as a preset to lay over others."""
    how = (
        "the errors of one measurement, doubled"
        if count == 1
        else f"ranges of {count} measurements, widened by their width"
    )
    lines = [
        f"# Limits of one model, by workflow/scripts/limits.py: {how}.",
        "precision:",
        "  limits_of:",
        f"    {model}:",
    ]
    for name, limit in limits.items():
        lines.append(f"      {name}: {{{', '.join(f'{kind}: {value:g}' for kind, value in limit.items())}}}")
    return "\n".join(lines) + "\n"
