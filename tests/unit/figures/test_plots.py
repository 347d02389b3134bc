import json
import os
import re
import subprocess
import sys
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import FillBetweenPolyCollection
from matplotlib.colors import to_hex
from matplotlib.text import Text

from score_centering.figures.arms import KNOWN
from score_centering.figures.canvas import drawing, save
from score_centering.figures.experiment import read_experiment
from score_centering.figures.numerals import percent, power_of_ten, scientific
from score_centering.figures.plots import FIGURES, mean_phase_seconds, reward_k3_path
from score_centering.figures.typeface import CHARACTERS

PROGRAM = Path(__file__).parents[3] / "workflow" / "scripts" / "figures.py"


@pytest.fixture(scope="module")
def drawn(tiny):
    experiment = read_experiment(tiny, control="grpo_bf16")
    with drawing():
        figures = {name: draw(experiment) for name, draw in FIGURES.items()}
        for figure in figures.values():
            FigureCanvasAgg(figure).draw()
        yield figures


def texts(figure):
    """Every visible, non-empty text with its box in pixels."""
    renderer = figure.canvas.get_renderer()
    found = [artist for artist in figure.findobj(lambda artist: hasattr(artist, "get_fontsize"))]
    shown = [text for text in found if text.get_visible() and text.get_text()]
    shown = [text for text in shown if text.axes is None or text.axes.get_visible()]
    for axes in figure.axes:
        for axis in (axes.xaxis, axes.yaxis):
            drawn = {id(label) for tick in axis._update_ticks() for label in (tick.label1,) if label.get_visible()}
            every = {id(label) for tick in axis.majorTicks + axis.minorTicks for label in (tick.label1, tick.label2)}
            shown = [text for text in shown if id(text) not in every or id(text) in drawn]
    return [(text.get_text(), Text.get_window_extent(text, renderer)) for text in dict.fromkeys(shown)]


@pytest.mark.parametrize("name", FIGURES)
def test_no_text_is_cut_off_or_lies_on_another(drawn, name):
    figure = drawn[name]
    boxes = texts(figure)
    assert len(boxes) > 5
    for text, box in boxes:
        assert box.x0 >= 0 and box.y0 >= 0, text
        assert box.x1 <= figure.bbox.x1 and box.y1 <= figure.bbox.y1, text
    for (first, one), (second, other) in combinations(boxes, 2):
        width = min(one.x1, other.x1) - max(one.x0, other.x0)
        height = min(one.y1, other.y1) - max(one.y0, other.y0)
        assert not (width > 0.5 and height > 0.5), (name, first, second)


def test_an_arm_has_one_colour_everywhere(drawn):
    for name in ("reward", "k3_kl", "validation_reward", "clean_reward", "response_length", "head_mass", "drift_meter"):
        colours = {to_hex(line.get_color()) for axes in drawn[name].axes for line in axes.lines}
        assert colours <= {look.colour for look in KNOWN.values()}
    titles = [axes.get_title(loc="left") for axes in drawn["reward_vs_k3"].axes]
    assert titles == [look.label for look in KNOWN.values()]
    for axes, look in zip(drawn["reward_vs_k3"].axes, KNOWN.values(), strict=True):
        assert {to_hex(line.get_color()) for line in axes.lines} - {"#d4d4d4", "#ffffff"} == {look.colour}


@pytest.mark.parametrize("name", FIGURES)
def test_the_typeface_has_every_character(drawn, name):
    assert {character for text, _ in texts(drawn[name]) for character in text} <= set(CHARACTERS)


def test_a_pdf_embeds_each_style_of_the_typeface_once_as_truetype(drawn, tmp_path):
    *_, pdf = save(drawn["reward_vs_k3"], tmp_path / "figure")
    content = pdf.read_bytes()
    fonts = re.findall(rb"/Subtype /CIDFontType2\s/BaseFont /[A-Z]{6}\+([\w-]+)", content)
    assert sorted(fonts) == [b"ScoreCenteringSans-Bold", b"ScoreCenteringSans-Regular"]
    assert content.count(b"/FontFile2") == 2
    assert b"/Type3" not in content


def test_axes_name_their_units(drawn):
    labels = {name: [(axes.get_xlabel(), axes.get_ylabel()) for axes in figure.axes] for name, figure in drawn.items()}
    assert labels["reward"] == [("Step (optimiser updates)", "Mean reward (0 to 1)")]
    assert labels["k3_kl"] == [("Step (optimiser updates)", "K3 (nats per token)")]
    assert labels["response_length"][0][1] == "Mean response length (tokens)"
    assert labels["timing"][0][0] == "Mean time of a step (s)"


def test_k3_of_zero_is_drawn_on_a_labelled_floor(drawn):
    axes = drawn["k3_kl"].axes[0]
    floor = axes.get_ylim()[0]
    assert axes.get_yscale() == "log" and floor > 0
    assert min(line.get_ydata().min() for line in axes.lines) == floor
    assert [label.get_text() for label in axes.get_yticklabels() if label.get_text().startswith("≤")]


@pytest.mark.parametrize("k3", [[0.0] * 12, [None] * 12, [1e-12] * 11 + [4e8], [-1e-17] * 6 + [0.5] * 6])
def test_odd_k3_is_drawn(synthetic, tmp_path, k3):
    folder = tmp_path / "e"
    synthetic.write_run(folder, "grpo_bf16", 0, 12, {"k3_kl": k3})
    with drawing():
        for name in ("k3_kl", "reward_vs_k3"):
            FigureCanvasAgg(FIGURES[name](read_experiment(folder, control="grpo_bf16"))).draw()


def test_only_the_floor_is_marked_at_any_scale(synthetic, tmp_path):
    synthetic.write_run(tmp_path / "e", "sc", 0, 12, {"k3_kl": [0.0, *np.geomspace(2e-9, 9e-9, 11)]})
    with drawing():
        figure = FIGURES["k3_kl"](read_experiment(tmp_path / "e", control="grpo_bf16"))
        FigureCanvasAgg(figure).draw()
    labels = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert [label for label in labels if "≤" in label] == ["≤10⁻¹⁰"]


def test_one_step_one_arm(synthetic, tmp_path):
    folder = synthetic.write_experiment(tmp_path / "e", ("mine",), steps=1)
    with drawing():
        for draw in FIGURES.values():
            FigureCanvasAgg(draw(read_experiment(folder, control="grpo_bf16"))).draw()


def test_seeds_give_a_band(synthetic, tmp_path, drawn):
    folder = synthetic.write_experiment(tmp_path / "e", ("sc", "grpo"), (0, 1, 2), steps=12)
    with drawing():
        axes = FIGURES["reward"](read_experiment(folder, control="grpo_bf16")).axes[0]
    assert len(axes.findobj(FillBetweenPolyCollection)) == 2
    assert not drawn["reward"].axes[0].findobj(FillBetweenPolyCollection)


def test_phases_add_up_to_the_step(tiny):
    experiment = read_experiment(tiny, control="grpo_bf16")
    phases = mean_phase_seconds(experiment, "sc")
    timing = experiment.of("sc")[0].timing
    assert phases.sum() == pytest.approx((timing["step_s"] + timing["checkpoint_s"]).mean()), (
        "a step holds no checkpoint"
    )
    assert phases[-1] == pytest.approx(0.01)


def test_numerals():
    assert [scientific(value) for value in (0.0, 2.34e-3, 12.0)] == ["0", "2.3×10⁻³", "1.2×10¹"]
    assert (percent(0.1), percent(0.956, 1)) == ("10\N{NO-BREAK SPACE}%", "95.6\N{NO-BREAK SPACE}%")
    assert [power_of_ten(value) for value in (0.01, 2e-3, 1.0, 5e8)] == ["10⁻²", "2×10⁻³", "10⁰", "5×10⁸"]


def options(experiment: Path, output: Path, arms=tuple(KNOWN)) -> list[str]:
    settings = {
        "experiment": "tiny",
        "arms": list(arms),
        "seeds": [0],
        "control": "grpo_bf16",
        "descriptions": dict.fromkeys(arms, "what it does"),
        "figures": {"smoothing_steps": 10},
    }
    return ["--experiment-dir", str(experiment), "--output-dir", str(output), "--settings", json.dumps(settings)]


def test_program_needs_no_torch_and_writes_the_same_bytes(tiny, tmp_path):
    """The program, in a process where importing torch fails, against the same figures drawn in this process."""
    start = f"import runpy, sys; sys.modules['torch'] = None; runpy.run_path({str(PROGRAM)!r}, run_name='__main__')"
    command = [sys.executable, "-W", "error", "-c", start, *options(tiny, tmp_path)]
    finished = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"LC_ALL": "C"})
    assert finished.returncode == 0, finished.stderr
    written = [Path(line) for line in finished.stdout.splitlines()]
    assert len(written) == 3 * len(FIGURES) + 2
    with drawing():
        for name in ("reward_vs_k3", "timing"):
            for path in save(FIGURES[name](read_experiment(tiny, control="grpo_bf16")), tmp_path / "again" / name):
                assert path.read_bytes() == (tmp_path / "figures" / path.name).read_bytes(), path.name
    assert b"<dc:date>" not in (tmp_path / "figures" / "reward.svg").read_bytes()
    assert b"CreationDate" not in (tmp_path / "figures" / "reward.pdf").read_bytes()


def test_program_names_a_missing_run(tiny, tmp_path):
    command = [sys.executable, str(PROGRAM), *options(tiny, tmp_path, ["sc", "nope"])]
    finished = subprocess.run(command, capture_output=True, text=True)
    assert finished.returncode == 2
    assert finished.stderr.splitlines() == [
        f"error: {tiny}/runs/nope/seed0/metrics.parquet: missing; arm nope, seed 0 has not finished training"
    ]
    assert not list(tmp_path.iterdir())


def test_users_matplotlib_settings_do_not_matter(tiny, tmp_path, monkeypatch):
    import matplotlib

    with drawing():
        first = save(FIGURES["validation_reward"](read_experiment(tiny, control="grpo_bf16")), tmp_path / "a")
    monkeypatch.setitem(matplotlib.rcParams, "lines.linewidth", 9.0)
    monkeypatch.setitem(matplotlib.rcParams, "font.family", ["monospace"])
    with drawing():
        second = save(FIGURES["validation_reward"](read_experiment(tiny, control="grpo_bf16")), tmp_path / "b")
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]
    assert np.all([path.stat().st_size > 5_000 for path in first])


def test_the_path_of_reward_and_k3_begins_with_the_first_whole_window(synthetic, tmp_path):
    """60 steps: windows of twelve, a fifth; its first point is the mean of steps 1 to 12, its last of 49 to 60."""
    reward, k3 = [step / 60 for step in range(1, 61)], [step * 1e-3 for step in range(1, 61)]
    synthetic.write_run(tmp_path / "e", "sc", 0, 60, {"reward_mean": reward, "k3_kl": k3})
    steps, x, y = reward_k3_path(read_experiment(tmp_path / "e"), "sc")
    assert (steps[0], steps[-1], len(steps)) == (12, 60, 49)
    assert (x[0], y[0]) == (pytest.approx(6.5e-3), pytest.approx(6.5 / 60))
    assert (x[-1], y[-1]) == (pytest.approx(54.5e-3), pytest.approx(54.5 / 60))
