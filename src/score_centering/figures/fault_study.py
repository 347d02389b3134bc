"""Quantisation or fault: what the checks see of a damaged KV cache, and how the arms react."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator, PercentFormatter

from score_centering.figures.arms import styles
from score_centering.figures.canvas import TWO_COLUMNS, EndLabel, axes_row, label_ends, label_margin
from score_centering.figures.colours import readable_on_white
from score_centering.figures.numerals import percent
from score_centering.figures.plots import K3_LABEL, REWARD_LABEL, log_axis, log_floor
from score_centering.figures.scan import described, read_run, scan_table
from score_centering.settings.studies import NO_FAULT

KINDS = {"codes": ("codes", "#0072b2", "o"), "scale": ("scale", "#d55e00", "^"), "nan": ("NaN", "#6b6b6b", "X")}
DASHES = {"codes": "-", "scale": (0, (4.5, 1.5)), "nan": (0, (1.2, 1.0))}

CHECK = described(
    (
        ("kind", pa.string(), "", "none, codes (random codes), scale (times 2^-8 … 2^8) or nan (a scale that is NaN)"),
        ("rate", pa.float64(), "1", "share of the cache's entries (key or value of a token and KV head) that are hit"),
        ("transient", pa.bool_(), "", "other entries in every call; else the same ones"),
        ("equal_tokens_share", pa.float64(), "1", "share of positions with equal tokens in two generations"),
        ("max_logprob_difference", pa.float64(), "nats", "largest difference up to a rollout's first unequal token"),
        ("not_finite_logprobs", pa.float64(), "1", "log-probs that are not finite"),
        ("k3_kl", pa.float64(), "nats/token", "K3 between the trainer's BF16 forward and the engine"),
        ("abs_logprob_gap_mean", pa.float64(), "nats", "mean |log p − log q| of the sampled tokens"),
        ("abs_logprob_gap_max", pa.float64(), "nats", "largest of those"),
        ("refusal", pa.string(), "", "the line with which the engine refused to go on; null where it did not"),
        ("seen_by_repeat", pa.bool_(), "", "the gate's limits on repeatability fail; null after a refusal"),
        ("seen_by_gap", pa.bool_(), "", "the gate's limits on the gap to the trainer fail; null after a refusal"),
    )
)


def check_table(rows: Sequence[Mapping[str, Any]], settings: str) -> pa.Table:
    """Rows of `validation.faults.check_faults` with their stage's settings as metadata."""
    return pa.Table.from_pylist(list(rows), CHECK).replace_schema_metadata({"settings": settings})


def fault_table(runs: Sequence[Path]) -> pa.Table:
    """One row a run, in the order given; run folders are …/<kind>-<rate>/<arm>/seed<k>, or none/<arm>/seed<k>."""
    rows = []
    for run in runs:
        kind, _, rate = run.parents[1].name.partition("-")
        rows.append(read_run(run, {"kind": kind, "rate": float(rate or 0)}))
    return scan_table(rows)


def draw_faults(check: pa.Table, runs: pa.Table) -> Figure:
    """Left: K3 the check measures. Middle: tokens that repeat. Right: reward of the trained arms. All by fault rate."""
    limits = json.loads(check.schema.metadata[b"settings"])["limits"]
    seen, trained = check.to_pandas(), runs.to_pandas()
    looks = styles(trained["arm"])
    margin = label_margin([f"{look.label}, {kind}" for look in looks.values() for kind in ("codes", "scale")])
    figure, grid = axes_row(TWO_COLUMNS, 2.4, 3, left=0.58, right=margin, top=0.3, gap=0.6)
    gap, repeat, reward = grid[0]
    rates = sorted(seen.loc[seen["rate"] > 0, "rate"])
    for axes in grid[0]:
        _rate_axis(axes, rates)
    _gap(gap, seen, _largest(limits, "k3_kl"))
    _repeat(repeat, seen)
    _reward(reward, trained)
    return figure


def _gap(axes: Axes, seen: pd.DataFrame, limit: float | None) -> None:
    healthy = seen.loc[seen["kind"] == NO_FAULT, "k3_kl"].iloc[0]
    values = np.array([value for value in (*seen["k3_kl"], limit) if value is not None and not np.isnan(value)])
    log_axis(axes.yaxis, log_floor(values), values)
    axes.set_title("What the gate measures", loc="left")
    axes.set_ylabel(K3_LABEL)
    axes.axhline(healthy, color="#262626", linewidth=0.8)
    _remark(axes, healthy, "no fault")
    if limit is not None:
        axes.axhline(limit, color="#a50f15", linewidth=0.8, linestyle=(0, (3, 2)))
        _remark(axes, limit, "limit", "#a50f15")
    for kind, rows in _transient(seen):
        axes.plot(rows["rate"], rows["k3_kl"], **_style(kind))


def _repeat(axes: Axes, seen: pd.DataFrame) -> None:
    axes.set_title("The same seeds twice", loc="left")
    axes.set_ylabel("Tokens that repeat")
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=None))
    axes.set_ylim(0.0, 1.06)
    for kind, rows in _transient(seen):
        axes.plot(rows["rate"], rows["equal_tokens_share"], label=KINDS[kind][0], **_style(kind))
    steady = seen[(~seen["transient"]) & (seen["kind"] != NO_FAULT) & seen["refusal"].isna()]
    axes.plot(
        steady["rate"], steady["equal_tokens_share"], "_", color="#262626", markersize=7, label="persistent fault"
    )
    refused = seen.loc[seen["refusal"].notna(), "rate"]
    if len(refused):
        axes.plot(refused, np.zeros(len(refused)), "X", color=KINDS["nan"][1], label="NaN: refused", clip_on=False)
    axes.legend(frameon=False, loc="lower left", handlelength=1.8, borderaxespad=0.2)


def _reward(axes: Axes, trained: pd.DataFrame) -> None:
    looks, ends = styles(trained["arm"]), []
    axes.set_title("Trained under the fault", loc="left")
    axes.set_ylabel(REWARD_LABEL)
    for arm, look in looks.items():
        rows = trained[trained["arm"] == arm]
        healthy = rows.loc[rows["kind"] == NO_FAULT, "reward_last"].mean()
        axes.axhline(healthy, color=look.colour, linewidth=0.5, alpha=0.6)
        for kind in dict.fromkeys(rows.loc[rows["kind"] != NO_FAULT, "kind"]):
            means = rows[rows["kind"] == kind].groupby("rate")["reward_last"].mean()
            axes.plot(
                means.index, means, color=look.colour, linestyle=DASHES[kind], marker=KINDS[kind][2], markersize=3.2,
                clip_on=False,
            )  # fmt: skip
            colour = readable_on_white(look.colour)
            ends.append(EndLabel(f"{look.label}, {kind}", colour, means.index[-1], means.iloc[-1]))
    axes.set_ylim(bottom=0.0)
    label_ends(axes, ends)


def _transient(seen: pd.DataFrame) -> list[tuple[str, pd.DataFrame]]:
    """Rows of each kind of transient fault that the engine did not refuse, by rate."""
    rows = seen[seen["transient"] & (seen["kind"] != NO_FAULT) & seen["refusal"].isna()]
    return [(kind, part.sort_values("rate")) for kind, part in rows.groupby("kind", sort=False)]


def _style(kind: str) -> dict[str, Any]:
    _, colour, marker = KINDS[kind]
    return {"color": colour, "marker": marker, "linestyle": DASHES[kind], "markersize": 3.2, "clip_on": False}


def _remark(axes: Axes, y: float, text: str, colour: str = "#262626") -> None:
    """Names a horizontal line where the curves, which rise with the damage, have left it."""
    axes.annotate(
        text, (1.0, y), xycoords=("axes fraction", "data"), xytext=(-3, 2), textcoords="offset points", color=colour,
        ha="right",
    )  # fmt: skip


def _rate_axis(axes: Axes, rates: Sequence[float]) -> None:
    axes.set(xscale="log", xlim=(min(rates) / 1.5, max(rates) * 1.5), xlabel="Damaged cache entries")
    axes.set_xticks(sorted(set(rates)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: percent(value, 0 if value >= 0.01 else 1)))


def _largest(limits: Mapping[str, Mapping[str, float]], name: str) -> float | None:
    """The upper limit of `<precision>.<name>`; a check is of one precision."""
    return next((limit["max"] for key, limit in limits.items() if key.endswith(f".{name}")), None)
