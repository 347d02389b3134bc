"""One page of figures beside validation.json: weights, activations, KV cache, log-prob gap, head mass, drift."""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from score_centering.figures.canvas import TWO_COLUMNS

CONTROL = "#7a7a7a"  # of BF16
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
MARKERS = "s^vDPX"
K_COLOUR, V_COLOUR = "#009e73", "#cc79a7"
Looks = Mapping[str, Mapping[str, Any]]
"""Label, colour and marker of each precision, BF16 first."""


def looks(labels: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """How each precision is drawn; the first is the BF16 control."""
    styles = [(CONTROL, "o"), *((colour, marker) for colour, marker in zip(COLOURS, MARKERS, strict=True))]
    return {
        name: {"label": label, "color": styles[i % len(styles)][0], "marker": styles[i % len(styles)][1]}
        for i, (name, label) in enumerate(labels.items())
    }


def page(validation: Mapping[str, Any]) -> Figure:
    """Six panels for the content of a validation.json; call it inside `canvas.drawing`."""
    numbers, layers = validation["numbers"], validation["layers"]
    head_sizes: Sequence[int] = validation["head_sizes"]
    drawn = looks(validation["precisions"])
    figure = Figure(figsize=(TWO_COLUMNS, 5.8), layout="constrained")
    axes = figure.subplots(2, 3)
    _weights(axes[0, 0], layers["weights"], validation["formats"])
    _activations(axes[0, 1], layers, drawn)
    _kv(axes[0, 2], layers, drawn)
    _gap(axes[1, 0], numbers, drawn)
    _head_mass(axes[1, 1], numbers, drawn, head_sizes)
    _drift(axes[1, 2], numbers, drawn, head_sizes)
    figure.draw_without_rendering()  # lay it out once, not for every file
    figure.set_layout_engine("none")
    return figure


def _weights(axes: Axes, weights: Mapping[str, Mapping[str, Mapping[str, float]]], labels: Mapping[str, str]) -> None:
    if not weights:
        axes.set_axis_off()
        return
    for index, (name, rows) in enumerate(weights.items()):
        colour, marker = COLOURS[index % len(COLOURS)], MARKERS[index % len(MARKERS)]
        x, label = range(len(rows)), labels[name]
        axes.plot(x, [e["weight_relative"] for e in rows.values()], marker, color=colour, label=f"{label}, whole layer")
        worst = [e["weight_channel_max"] for e in rows.values()]
        axes.plot(x, worst, "_", color=colour, label=f"{label}, worst channel")
    _layer_axis(axes, "Weight error, relative", max(map(len, weights.values())))
    _headroom(axes)
    axes.legend()


def _activations(axes: Axes, layers: Mapping[str, Any], drawn: Looks) -> None:
    local: set[str] = set()
    count = 0
    for name, look in drawn.items():
        rows = list(layers.get(name, {}).get("layers", {}).values())
        if not rows:
            continue
        count = max(count, len(rows))
        axes.plot(range(len(rows)), [e["output_relative"] for e in rows], **look | {"label": f"{look['label']}, whole"})
        linears = name.split("_")[0]
        if linears not in local:
            label = f"{look['label']}, this layer only"
            axes.plot(range(len(rows)), [e["local_relative"] for e in rows], ":", **look | {"label": label})
            local.add(linears)
    if not count:
        axes.set_axis_off()
        return
    _layer_axis(axes, "Layer output error, relative", count)
    _headroom(axes)
    axes.legend()


def _kv(axes: Axes, layers: Mapping[str, Any], drawn: Looks) -> None:
    """K and V of the first precision that has a quantised cache."""
    quantised = [(look["label"], layers[name]["kv"]) for name, look in drawn.items() if "kv" in layers.get(name, {})]
    if not quantised:
        axes.set_axis_off()
        return
    label, kv = quantised[0]
    x = range(len(kv))
    axes.bar([i - 0.18 for i in x], [e["key_relative"] for e in kv.values()], 0.34, color=K_COLOUR, label="K")
    axes.bar([i + 0.18 for i in x], [e["value_relative"] for e in kv.values()], 0.34, color=V_COLOUR, label="V")
    axes.set_xticks(list(x), [name.removeprefix("layer ") for name in kv])
    axes.set_xlabel("attention layer")
    axes.set_xlim(-1, len(kv))
    axes.set_title(f"Cache error, relative: {label}", loc="left")
    _headroom(axes)
    axes.legend(ncols=2)


def _gap(axes: Axes, numbers: Mapping[str, float], drawn: Looks) -> None:
    names = ("mean", "p95", "max")
    for precision, look in drawn.items():
        values = [numbers[f"{precision}.abs_logprob_gap_{name}"] for name in names]
        axes.plot(names, values, linestyle="none", **look)
    axes.set_yscale("log")
    axes.set_title("|Δ log p| of sampled tokens, nats", loc="left")
    axes.margins(x=0.2)
    axes.legend()


def _head_mass(axes: Axes, numbers: Mapping[str, float], drawn: Looks, head_sizes: Sequence[int]) -> None:
    for precision, look in drawn.items():
        tails = [max(1 - numbers[f"{precision}.head_mass_sampler.k{k}"], 1e-6) for k in head_sizes]
        axes.plot(head_sizes, tails, **look)
    axes.set_yscale("log")
    _head_axis(axes, "Mass outside the head, 1 − Q_H", head_sizes)
    axes.legend()


def _drift(axes: Axes, numbers: Mapping[str, float], drawn: Looks, head_sizes: Sequence[int]) -> None:
    names = ["uncentered", *(f"k{k}" for k in head_sizes)]
    x = range(len(names))
    for precision, look in drawn.items():
        values = [numbers[f"{precision}.drift.lm_head.{name}"] for name in names]
        axes.plot(x, [max(value, 1e-12) for value in values], **look)
    axes.set_yscale("log")
    axes.set_xticks(list(x), ["none", *map(str, head_sizes)])
    axes.set_xlabel("centering with K")
    axes.set_title("Drift ‖Σ q ∇log p‖, LM head", loc="left")
    axes.legend()


def _layer_axis(axes: Axes, title: str, count: int) -> None:
    axes.set_ylim(bottom=0)
    axes.set_xlim(-0.7, count - 0.3)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("quantised layer, in model order")
    axes.set_title(title, loc="left")


def _headroom(axes: Axes) -> None:
    """Room for the legend above the data of a linear axis that starts at 0."""
    axes.set_ylim(top=1.35 * axes.get_ylim()[1])


def _head_axis(axes: Axes, title: str, head_sizes: Sequence[int]) -> None:
    axes.set_xscale("log")
    axes.set_xticks(list(head_sizes), [str(k) for k in head_sizes])
    axes.set_xticks([], minor=True)
    axes.set_xlabel("K")
    axes.set_title(title, loc="left")
