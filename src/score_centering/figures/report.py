"""report.html: the whole experiment as one file that needs no network.

Python writes every table and text; the charts are drawn by assets/report.js from numbers embedded in the page, so that
they fit the width of the screen, show values under the pointer, and let arms be switched off.
"""

import base64
import json
from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

from score_centering.figures.colours import readable_on_white
from score_centering.figures.differences_section import differences
from score_centering.figures.experiment import Experiment
from score_centering.figures.html import table
from score_centering.figures.plots import PHASES, mean_phase_seconds, path_window, reward_k3_path, smoothed_band
from score_centering.figures.series import across_seeds
from score_centering.figures.summary import COLUMNS, display, summarise
from score_centering.figures.task_section import task
from score_centering.figures.verdict import verdict
from score_centering.precision.registry import UNQUANTISED_PRECISION, precision_labels
from score_centering.runs.watch import duration
from score_centering.settings import UserError
from score_centering.settings.dotted import by_dotted_key, differing
from score_centering.settings.inputs import read_json

# id, column of metrics.parquet, title, unit, kind of axis, what it shows
CHARTS = (
    ("reward", "reward_mean", "Reward", "mean reward (0 to 1)", "linear", "Mean reward of each step's rollouts."),
    ("validation_reward", "val_reward_mean", "Validation reward", "mean reward (0 to 1)", "sparse",
     "Greedy decoding on the test split, in the precision of the arm's rollouts."),
    ("clean_reward", "clean_reward_mean", "Clean reward", "mean reward (0 to 1)", "sparse",
     "The trained weights sampled in BF16 at T = 1: a broken sampler leaves it high, a broken policy does not."),
    ("k3_kl", "k3_kl", "K3", "K3 (nats per token)", "log",
     "Mean over generated tokens of exp(d) − 1 − d, where d = log p − log q."),
    ("response_length", "response_length_mean", "Response length", "tokens", "linear",
     "Mean number of generated tokens of a rollout."),
    ("truncated_share", "truncated_share", "Truncation", "share (0 to 1)", "linear",
     "Share of rollouts cut at the length limit; they earn no reward."),
    ("head_mass", "head_mass_sampler", "Head mass", "probability (0 to 1)", "linear",
     "Sampler's probability of its recorded candidates. Only arms with score centering record them."),
    ("correction", "correction_abs_mean", "Correction strength", "Σ|c| per token", "linear",
     "Mean over generated tokens of the summed absolute coefficients of the centering correction."),
    ("drift_share", "drift_share", "Drift's share", "norm over the gradient's norm", "sparse",
     "Drift meter: norm of what centering subtracts over the norm of the arm's own gradient."),
    ("drift_coherence", "drift_coherence", "Drift's coherence", "coherence (0 to 1)", "sparse",
     "Norm of the sum of all measured drifts over the sum of their norms: 1/√n is noise, near 1 one direction."),
)  # fmt: skip


def render(experiment: Experiment, descriptions: Mapping[str, str], folder: Path) -> str:
    """The page, from the runs of `experiment` and the JSON files below `folder`. The same inputs give the same text."""
    looks = experiment.looks
    found = verdict(experiment)
    sections = [
        ("summary", "Summary", _summary(experiment)),
        ("differences", "Differences", differences(experiment, folder)),
        ("figures", "Figures", _figures(experiment)),
        ("task", "The task", task(folder)),
        ("precision", "Precision gate", _precision_gate(folder)),
        ("smoke", "Smoke gates", _smoke_gates(experiment, folder)),
        ("pins", "Dataset and model", _pins(folder)),
        ("config", "Configuration", _configuration(experiment)),
        ("provenance", "Provenance", _provenance(experiment)),
        ("rerun", "Run it again", _rerun(experiment, descriptions)),
    ]
    links = "".join(f'<a href="#{key}">{escape(title)}</a>' for key, title, _ in sections)
    body = "".join(f'<section id="{key}"><h2>{escape(title)}</h2>{html}</section>' for key, title, html in sections)
    notes = "".join(f"<li>{escape(note)}</li>" for note in found.notes)
    data = json.dumps(chart_data(experiment), separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    light = "".join(
        f"--arm-{index}:{look.colour};--ink-{index}:{readable_on_white(look.colour)};"
        for index, look in enumerate(looks.values())
    )
    dark = "".join(
        f"--arm-{index}:{look.dark_colour};--ink-{index}:{look.dark_colour};"
        for index, look in enumerate(looks.values())
    )
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{escape(experiment.name)} · score centering</title>
<link rel="icon" href="data:,">
<style>
:root{{{light}}}
@media (prefers-color-scheme: dark){{:root{{{dark}}}}}
{_asset("report.css")}</style>
</head>
<body>
<header>
<p class="kicker">Score centering · experiment <code>{escape(experiment.name)}</code></p>
<h1>{escape(found.headline)}</h1>
<ul class="notes">{notes}</ul>
<nav aria-label="Sections">{links}</nav>
</header>
<main>
{body}
</main>
<div id="tooltip" role="status" hidden></div>
<script type="application/json" id="data">{data}</script>
<script>
{_asset("report.js")}</script>
</body>
</html>
"""


def chart_data(experiment: Experiment) -> dict[str, Any]:
    """What report.js draws: the arms' looks, and per chart and arm the steps, raw and smoothed values, and range."""
    looks = experiment.looks
    charts = []
    for key, column, title, unit, kind, _ in CHARTS:
        window = 1 if kind == "sparse" else experiment.smoothing
        series = []
        for index, arm in enumerate(looks):
            smooth = smoothed_band(experiment, arm, column, window).measured()
            raw = across_seeds([(run.steps, run.metrics[column]) for run in experiment.of(arm)]).measured()
            if smooth.steps.size:
                series.append(
                    {
                        "arm": index,
                        "steps": smooth.steps.astype(int).tolist(),
                        "mean": _rounded(smooth.mean),
                        "raw": [raw.steps.astype(int).tolist(), _rounded(raw.mean)],
                        **({"low": _rounded(smooth.low), "high": _rounded(smooth.high)} if smooth.seeds > 1 else {}),
                    }
                )
        charts.append({"id": key, "title": title, "unit": unit, "kind": kind, "series": series})
    phases = [_rounded(mean_phase_seconds(experiment, arm)) for arm in looks]
    return {
        "arms": [
            {"name": arm, "label": look.label, "dashes": look.dashes, "control": arm == experiment.control}
            for arm, look in looks.items()
        ],
        "charts": charts,
        "paths": [
            {
                "arm": index,
                "points": [[int(step), *_rounded(np.array(point))] for step, *point in zip(*path, strict=True)],
            }
            for index, arm in enumerate(looks)
            if (path := reward_k3_path(experiment, arm))[0].size
        ],
        "phases": {
            "names": [name for name, *_ in PHASES],
            "colours": [fill for _, _, fill, _ in PHASES],
            "seconds": phases,
        },
    }


WORDS = (
    ("q", "the sampler's policy: what the rollouts were drawn from, here in low precision"),
    ("p", "the trainer's policy: its own weights, in the precision of training"),
    ("K3", "how far p is from q, in nats per token"),
    ("SC", "score centering: subtracts the score's mean under q, which would move the weights whatever the rewards"),
    ("TIS", "truncated importance sampling: each token weighs p/q, at most a limit"),
    ("MIS", "masked importance sampling: each token weighs p/q, or nothing where p/q is outside a band"),
)


def _summary(experiment: Experiment) -> str:
    looks = experiment.looks
    several_seeds = len({run.seed for run in experiment.runs}) > 1
    columns = [column for column in COLUMNS if several_seeds or column[0] != "seed"]
    heads = "".join(
        f'<th scope="col" aria-sort="none"><button type="button" title="{escape(text)}">{escape(HEADINGS[name])}'
        "</button></th>"
        for name, _, _, text in columns
    )
    rows = []
    for row in summarise(experiment).to_pylist():
        index = list(looks).index(row["arm"])
        swatch = f'<span class="swatch" style="--c:var(--arm-{index})"></span>'
        cells = [f'<th scope="row">{swatch}{escape(looks[row["arm"]].label)}</th>']
        for name, *_ in columns[1:]:
            value = "" if row[name] is None else repr(row[name])
            cells.append(f'<td data-value="{value}">{escape(display(name, row[name]))}</td>')
        rows.append(f'<tr data-arm="{index}">{"".join(cells)}</tr>')
    terms = "".join(
        f"<dt>{escape(HEADINGS[name])}</dt><dd>{escape(text)}{f' ({unit})' if unit not in ('', '1') else ''}</dd>"
        for name, _, unit, text in columns[1:]
    )
    words = "".join(f"<dt>{word}</dt><dd>{escape(text)}</dd>" for word, text in WORDS)
    return (
        f'<dl>{words}</dl><div class="wide"><table class="sortable"><thead><tr>{heads}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
        f"<details><summary>What the columns mean</summary><dl>{terms}</dl></details>"
    )


HEADINGS = {
    "arm": "Arm",
    "seed": "Seed",
    "steps": "Steps",
    "reward_first": "First reward",
    "reward_last": "Last reward",
    "reward_peak": "Peak",
    "reward_peak_step": "Peak at step",
    "reward_share_kept": "Kept",
    "collapse_step": "Below 10 % at",
    "k3_kl_max": "Max K3",
    "k3_kl_final": "Final K3",
    "truncated_share": "Truncated",
    "truncated_share_final": "Final truncated",
    "response_length_final": "Final length",
    "entropy_final": "Final entropy",
    "val_reward_last": "Validation",
    "clean_reward_last": "Clean",
}


def _figures(experiment: Experiment) -> str:
    chips = "".join(
        f'<button type="button" class="chip" aria-pressed="true" data-arm="{index}" style="--c:var(--arm-{index})">'
        f'<svg viewBox="0 0 26 8" aria-hidden="true"><line x1="1" x2="25" y1="4" y2="4" '
        f'stroke-dasharray="{_dashes(look.dashes)}"/></svg>{escape(look.label)}</button>'
        for index, look in enumerate(experiment.looks.values())
    )
    seeds = len({run.seed for run in experiment.runs})
    how = f"Bold: trailing mean over {experiment.smoothing} steps. Faint: raw values." + (
        f" Bands: range over {seeds} seeds." if seeds > 1 else ""
    )
    path = (
        f"The path of each arm through training, as means over {path_window(experiment)} steps: hollow circle at its "
        "start, filled one at its end."
    )
    if experiment.control:
        path += " Switch the control off to see the other arms closer."
    shown = [(key, title, text) for key, _, title, _, _, text in CHARTS]
    shown.insert(4, ("reward_vs_k3", "Reward against K3", path))
    figures = "".join(
        f"<figure><figcaption><h3>{escape(title)}</h3><p>{escape(text)}</p></figcaption>"
        f'<div class="chart" id="chart-{key}"></div></figure>'
        for key, title, text in shown
    )
    return (
        f'<div class="chips" role="group" aria-label="Arms shown">{chips}</div>'
        f"<p>{escape(how)} Point at a chart for its values, or focus it and use the arrow keys.</p>"
        "<noscript><p>The charts need JavaScript; the same figures lie in <code>figures/</code> as PNG, SVG and PDF."
        f'</p></noscript><div class="grid">{figures}'
        "<figure><figcaption><h3>Time of a step</h3><p>Mean wall-clock seconds by phase.</p></figcaption>"
        '<div class="bars" id="chart-timing"></div></figure></div>'
    )


def _precision_gate(folder: Path) -> str:
    gate = read_json(folder / "precision" / "gate.json")
    picture = base64.b64encode(_text(folder / "precision" / "validation.svg").encode()).decode()
    others = {name: value for name, value in gate["numbers"].items() if name not in gate["limits"]}
    rows = [
        (
            f"{_mark(gate['numbers'].get(name), limit)} <code>{escape(name)}</code>",
            _number(gate["numbers"].get(name)),
            _limit(limit),
        )
        for name, limit in gate["limits"].items()
    ]
    more = table(
        ("Number", "Measured"), [(f"<code>{escape(name)}</code>", _number(value)) for name, value in others.items()]
    )
    labels = precision_labels()
    measured = [labels.get(name.removesuffix(".k3_kl"), name) for name in gate["numbers"] if name.endswith(".k3_kl")]
    low = [label for label in measured if label != UNQUANTISED_PRECISION.label]
    return (
        _passed(gate, f"BF16 against {', '.join(low) or 'no other'} rollouts on held-out prompts")
        + table(("Number", "Measured", "Limit"), rows)
        + (f"<details><summary>{len(others)} more numbers, without a limit</summary>{more}</details>" if others else "")
        + f'<img class="paper" alt="Figures of the precision validation" src="data:image/svg+xml;base64,{picture}">'
    )


def _smoke_gates(experiment: Experiment, folder: Path) -> str:
    looks = experiment.looks
    gates = {arm: read_json(folder / "smoke" / arm / "gate.json") for arm in looks}
    names = list(dict.fromkeys(name for gate in gates.values() for name in gate["limits"]))
    rows = []
    for name in names:
        limits = [_limit(gate["limits"][name]) for gate in gates.values() if name in gate["limits"]]
        cells = [
            f"{_number(gate['numbers'].get(name))} {_mark(gate['numbers'].get(name), gate['limits'][name])}"
            if name in gate["limits"]
            else "–"
            for gate in gates.values()
        ]
        met = _verdict_mark(
            all(_met(gate["numbers"].get(name), gate["limits"].get(name, {})) for gate in gates.values())
        )
        rows.append((f"{met} <code>{escape(name)}</code>", " or ".join(dict.fromkeys(limits)), *cells))
    passed = {"passed": all(gate["passed"] for gate in gates.values()), "failures": []}
    passed["failures"] = [f"{arm}: {line}" for arm, gate in gates.items() for line in gate["failures"]]
    heads = ("Number", "Limit", *(look.label for look in looks.values()))
    return _passed(passed, "A few steps of each arm before its training") + table(heads, rows)


def _pins(folder: Path) -> str:
    parts = []
    for title, path in (("Dataset", "dataset/manifest.json"), ("Model", "model/manifest.json")):
        leaves = by_dotted_key(read_json(folder / path))
        rows = [
            (f"<code>{escape(name)}</code>", f"<code>{escape(_plain(value))}</code>") for name, value in leaves.items()
        ]
        parts.append(f"<h3>{title}</h3><p><code>{path}</code></p>{table(('Entry', 'Value'), rows, 'pins')}")
    return "".join(parts)


def _configuration(experiment: Experiment) -> str:
    looks = experiment.looks
    firsts = {arm: experiment.of(arm)[0] for arm in looks}
    settings = [run.identity["config"] for run in firsts.values()]
    rows = [
        (f"<code>{escape(name)}</code>", *(f"<code>{escape(_plain(value))}</code>" for value in values))
        for name, values in differing(settings).items()
    ]
    settings_table = table(("Setting", *(look.label for look in looks.values())), rows)
    texts = "".join(
        f"<details><summary>{escape(looks[arm].label)}: <code>config.yaml</code></summary>"
        f"<pre>{escape(_text(run.folder / 'config.yaml'))}</pre></details>"
        for arm, run in firsts.items()
    )
    return (
        f"<p>Settings in which the arms differ; all others are the same.</p>{settings_table}"
        f"<h3>Resolved, per arm</h3>{texts}"
    )


def _provenance(experiment: Experiment) -> str:
    kept = ("device", "package_sha256", "config_sha256", "dataset_manifest_sha256", "model_manifest_sha256",
            "quantised_config_sha256", "trainer_revision")  # fmt: skip
    everyone = [{name: run.identity[name] for name in (*kept, "versions")} for run in experiment.runs]
    own_values = differing(everyone)
    shared = {name: value for name, value in by_dotted_key(everyone[0]).items() if name not in own_values}
    rows = [(f"<code>{escape(name)}</code>", f"<code>{escape(_plain(value))}</code>") for name, value in shared.items()]
    own_rows = [
        (
            escape(experiment.looks[run.arm].label),
            str(run.seed),
            *(f"<code>{escape(_plain(values[index])[:16])}</code>" for values in own_values.values()),
        )
        for index, run in enumerate(experiment.runs)
    ]
    made = [
        (
            escape(experiment.looks[run.arm].label),
            str(run.seed),
            f"{run.started:%Y-%m-%d %H:%M}",
            duration(float(np.nansum(run.timing["step_s"]))),
            *(escape(text) for text in _origin(run.provenance)),
        )
        for run in experiment.runs
    ]
    return (
        table(("Arm", "Seed", "Started, UTC", "Steps took", "Host", "Processor", "Sources"), made)
        + table(("The same for every run", ""), rows, "pins")
        + table(("Arm", "Seed", *own_values), own_rows)
    )


def _origin(provenance: Mapping[str, Any]) -> tuple[str, str, str]:
    """Host, processor, and the commit with whether the sources were its."""
    commit = provenance.get("git_commit")
    state = "" if provenance.get("git_clean") else ", changed"
    sources = "no git" if commit is None else f"{commit[:12]}{state}"
    return provenance.get("host", "not recorded"), provenance.get("processor", "not recorded"), sources


def _rerun(experiment: Experiment, descriptions: Mapping[str, str]) -> str:
    items = "".join(
        f"<li><h3>{escape(look.label)}</h3><p>{escape(descriptions[arm])}</p>"
        f"<pre>snakemake --cores 1 all -R train_{escape(arm)}</pre></li>"
        for arm, look in experiment.looks.items()
    )
    return (
        "<p>Each command, with the <code>--configfile</code> that this experiment was run with, if any, trains one arm "
        "again and redraws the figures and this page, nothing else. By hand, outside "
        "Snakemake: <code>python workflow/scripts/train.py --baseline ARM --seed K</code>.</p>"
        f'<ul class="reruns">{items}</ul>'
    )


def _passed(gate: Mapping[str, Any], what: str) -> str:
    word = "passed" if gate["passed"] else "failed"
    lines = "".join(f"<li>{escape(line)}</li>" for line in gate["failures"])
    return f'<p><strong class="{word}">{"✓ Passed" if gate["passed"] else "✗ Failed"}.</strong> {what}.</p>' + (
        f"<ul>{lines}</ul>" if lines else ""
    )


def _mark(value: float | None, limit: Mapping[str, float]) -> str:
    return _verdict_mark(_met(value, limit))


def _met(value: float | None, limit: Mapping[str, float]) -> bool:
    """Whether a number holds its limit; one without a limit does."""
    return not limit or (value is not None and limit.get("min", -np.inf) <= value <= limit.get("max", np.inf))


def _verdict_mark(met: bool) -> str:
    return f'<span class="{"passed" if met else "failed"}">{"✓" if met else "✗"}</span>'


def _limit(limit: Mapping[str, float]) -> str:
    if {"min", "max"} <= limit.keys():
        if limit["min"] == limit["max"]:
            return f"= {_number(limit['min'])}"
        return f"{_number(limit['min'])} to {_number(limit['max'])}"
    return " ".join(f"{'≥' if kind == 'min' else '≤'} {_number(value)}" for kind, value in limit.items())


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.4g}"


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True, ensure_ascii=False)


def _text(path: Path) -> str:
    if not path.is_file():
        raise UserError(f"{path}: missing; the report needs it")
    return path.read_text(encoding="utf-8")


def _dashes(dashes: Sequence[float]) -> str:
    return " ".join(f"{length:g}" for length in dashes) or "none"


def _rounded(values: np.ndarray) -> list[float]:
    return [float(f"{value:.5g}") for value in values]


def _asset(name: str) -> str:
    return files("score_centering.figures").joinpath("assets", name).read_text(encoding="utf-8")
