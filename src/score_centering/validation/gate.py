"""Gates: numbers against limits. Imports no torch, so that the rule costs nothing.

A gate's JSON holds `numbers`, `limits`, `passed` and `failures`; a missing or non-finite number fails its limit.
"""

import math
from collections.abc import Mapping
from typing import Any

from score_centering.precision.registry import precision_labels
from score_centering.settings import UserError

SCHEMA_VERSION = 2
FAILED_EXIT_CODE = 3

OF_FORMATS = ("checkpoint.", "weights.")  # numbers of a checkpoint; any other is one of its rollouts
Limits = Mapping[str, Mapping[str, float | None]]


def failures(numbers: Mapping[str, float | None], limits: Limits) -> list[str]:
    """One line for each limit that is not met, in the order of `limits`: the number's name, its value, the limit."""
    lines = []
    for name, limit in limits.items():
        bounds = " and ".join(f"{kind} {limit[kind]:g}" for kind in ("min", "max") if limit.get(kind) is not None)
        if name not in numbers:
            lines.append(f"{name} is missing, limit {bounds}")
            continue
        value = numbers[name]
        if value is None or not math.isfinite(value):
            lines.append(f"{name} is not a finite number, limit {bounds}")
            continue
        low, high = limit.get("min"), limit.get("max")
        if (low is not None and value < low) or (high is not None and value > high):
            lines.append(f"{name} = {value:.6g}, limit {bounds}")
    return lines


def judge(numbers: Mapping[str, float | None], limits: Limits) -> dict[str, Any]:
    """The content of a gate's JSON. Without any limit nothing is judged, which is an error."""
    if not limits:
        raise UserError("a gate needs limits: add at least one below precision.limits or smoke.limits")
    lines = failures(numbers, limits)
    return {
        "schema_version": SCHEMA_VERSION,
        "passed": not lines,
        "failures": lines,
        "limits": {
            name: {kind: value for kind, value in limit.items() if value is not None} for name, limit in limits.items()
        },
        "numbers": dict(numbers),
    }


def precision_numbers(validation: Mapping[str, Any]) -> dict[str, float | None]:
    """The numbers of a `precision/validation.json`."""
    if not isinstance(validation.get("numbers"), dict):
        raise UserError("not a validation.json: it has no `numbers`")
    return dict(validation["numbers"])


def precision_limits(
    validation: Mapping[str, Any], configured: Mapping[str, Mapping[str, float | None] | None]
) -> dict[str, Mapping[str, float | None]]:
    """The limits that a `precision/validation.json` is held against: those of the formats it measured, and the
    configured ones over them.

    A configured name starts with a precision, with a format, or with `*`, which stands for each that was measured; a
    precision that this run does not measure is left out, null takes a limit away. Any other name stays and fails.
    """
    measured = [str(name) for name in validation.get("precisions", ())]
    formats = [str(name) for name in validation.get("formats", ())]
    limits: dict[str, Mapping[str, float | None] | None] = dict(validation.get("limits", {}))
    for name, limit in configured.items():
        prefix, _, rest = name.partition(".")
        of = formats if rest.startswith(OF_FORMATS) else measured
        if prefix == "*":
            limits |= {f"{each}.{rest}": limit for each in of if f"{each}.{rest}" not in configured}
        elif prefix in of or prefix not in precision_labels():
            limits[name] = limit
    return {name: limit for name, limit in limits.items() if limit is not None}


def smoke_numbers(run: Mapping[str, Any]) -> dict[str, float | None]:
    """The numbers of a smoke run's `run.json`, from `metrics`: one mapping a step, named as in `metrics.parquet`.

    A metric that no step measured (null everywhere) gives no number. Step 0, the state before the first update, does
    not count.
    """
    rows = [row for row in run.get("metrics") or () if row["step"] > 0]
    if not rows:
        raise UserError("not the run.json of a smoke run: it has no `metrics` of a step")
    numbers: dict[str, float | None] = {"steps": len(rows)}
    for name, metric, reduce in SMOKE_NUMBERS:
        values = [row.get(metric) for row in rows]
        if all(value is None for value in values):
            continue
        finite = all(value is not None and math.isfinite(value) for value in values)
        numbers[name] = reduce(values) if finite else None
    return numbers


def _largest_magnitude(values: list[float]) -> float:
    return max(abs(value) for value in values)


SMOKE_NUMBERS = (
    ("reward_mean_min", "reward_mean", min),
    ("reward_mean_max", "reward_mean", max),
    ("generated_tokens_min", "generated_tokens", min),
    ("response_length_max", "response_length_max", max),
    ("loss_abs_max", "loss", _largest_magnitude),
    ("grad_norm_max", "grad_norm", max),
    ("k3_kl_max", "k3_kl", max),
    ("abs_logprob_gap_max", "abs_logprob_gap_max", max),
    ("k3_clamped_tokens", "k3_clamped_tokens", sum),
    ("nonfinite_updates", "nonfinite_updates", sum),
    ("scorer_errors", "scorer_errors", sum),
    ("scorer_timeouts", "scorer_timeouts", sum),
    ("head_mass_sampler_min", "head_mass_sampler", min),
    ("head_mass_sampler_max", "head_mass_sampler", max),
)
