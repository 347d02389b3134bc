"""One page of figures beside validation.json: weights, activations, KV cache, log-prob gap, head mass, drift."""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from score_centering.figures.canvas import TWO_COLUMNS

COLOURS = {"bf16": "#7a7a7a", "int8": "#0072b2", "int8_int4kv": "#d55e00"}
LABELS = {"bf16": "BF16", "int8": "INT8", "int8_int4kv": "INT8 + INT4 KV"}
MARKERS = {"bf16": "o", "int8": "s", "int8_int4kv": "^"}


def page(validation: Mapping[str, Any]) -> Figure:
    """Six panels for the content of a validation.json; call it inside `canvas.drawing`."""
    numbers, layers = validation["numbers"], validation["layers"]
    head_sizes: Sequence[int] = validation["head_sizes"]
    precisions = [precision for precision in COLOURS if f"{precision}.k3_kl" in numbers]
    figure = Figure(figsize=(TWO_COLUMNS, 5.8), layout="constrained")
    axes = figure.subplots(2, 3)
    _weights(axes[0, 0], layers["weights"])
    _activations(axes[0, 1], layers)
    if "int8_int4kv" in precisions:
        _kv(axes[0, 2], layers["int8_int4kv"]["kv"])
    else:
        axes[0, 2].set_axis_off()
    _gap(axes[1, 0], numbers, precisions)
    _head_mass(axes[1, 1], numbers, precisions, head_sizes)
    _drift(axes[1, 2], numbers, precisions, head_sizes)
    figure.draw_without_rendering()  # lay it out once, not for every file
    figure.set_layout_engine("none")
    return figure


def _weights(axes: Axes, weights: Mapping[str, Mapping[str, float]]) -> None:
    x = range(len(weights))
    axes.plot(x, [e["weight_relative"] for e in weights.values()], "s", color=COLOURS["int8"], label="whole layer")
    axes.plot(x, [e["weight_channel_max"] for e in weights.values()], "_", color="#262626", label="worst channel")
    _layer_axis(axes, "Weight error, relative", len(weights))
    axes.legend()


def _activations(axes: Axes, layers: Mapping[str, Any]) -> None:
    for precision in (precision for precision in ("int8", "int8_int4kv") if precision in layers):
        rows = layers[precision]["layers"].values()
        x = range(len(rows))
        style = {"color": COLOURS[precision], "marker": MARKERS[precision]}
        axes.plot(x, [e["output_relative"] for e in rows], label=f"{LABELS[precision]}, whole model", **style)
        if precision == "int8":
            axes.plot(x, [e["local_relative"] for e in rows], ":", label="INT8, this layer only", **style)
    _layer_axis(axes, "Layer output error, relative", len(rows))
    _headroom(axes)
    axes.legend()


def _kv(axes: Axes, kv: Mapping[str, Mapping[str, float]]) -> None:
    x = range(len(kv))
    axes.bar([i - 0.18 for i in x], [e["key_relative"] for e in kv.values()], 0.34, color="#009e73", label="K")
    axes.bar([i + 0.18 for i in x], [e["value_relative"] for e in kv.values()], 0.34, color="#cc79a7", label="V")
    axes.set_xticks(list(x), [name.removeprefix("layer ") for name in kv])
    axes.set_xlabel("attention layer")
    axes.set_xlim(-1, len(kv))
    axes.set_title("INT4 KV error, relative", loc="left")
    _headroom(axes)
    axes.legend(ncols=2)


def _gap(axes: Axes, numbers: Mapping[str, float], precisions: Sequence[str]) -> None:
    names = ("mean", "p95", "max")
    for precision in precisions:
        values = [numbers[f"{precision}.abs_logprob_gap_{name}"] for name in names]
        axes.plot(names, values, MARKERS[precision], color=COLOURS[precision], label=LABELS[precision])
    axes.set_yscale("log")
    axes.set_title("|Δ log p| of sampled tokens, nats", loc="left")
    axes.margins(x=0.2)
    axes.legend()


def _head_mass(axes: Axes, numbers: Mapping[str, float], precisions: Sequence[str], head_sizes: Sequence[int]) -> None:
    for precision in precisions:
        style = {"color": COLOURS[precision], "marker": MARKERS[precision]}
        tails = [max(1 - numbers[f"{precision}.head_mass_sampler.k{k}"], 1e-6) for k in head_sizes]
        axes.plot(head_sizes, tails, label=LABELS[precision], **style)
    axes.set_yscale("log")
    _head_axis(axes, "Mass outside the head, 1 − Q_H", head_sizes)
    axes.legend()


def _drift(axes: Axes, numbers: Mapping[str, float], precisions: Sequence[str], head_sizes: Sequence[int]) -> None:
    names = ["uncentered", *(f"k{k}" for k in head_sizes)]
    x = range(len(names))
    for precision in precisions:
        style = {"color": COLOURS[precision], "marker": MARKERS[precision]}
        values = [numbers[f"{precision}.drift.lm_head.{name}"] for name in names]
        axes.plot(x, [max(value, 1e-12) for value in values], label=LABELS[precision], **style)
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
