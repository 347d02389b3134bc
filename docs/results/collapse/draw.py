"""Figures and numbers of the search for the collapse, from runs.parquet and exploration.parquet.

python docs/results/collapse/draw.py [FOLDER] draws them and prints the tables of the page.
"""

import sys
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from score_centering.figures import outcome
from score_centering.figures.arms import styles
from score_centering.figures.canvas import (
    TWO_COLUMNS,
    EndLabel,
    axes_row,
    drawing,
    label_ends,
    label_margin,
)
from score_centering.figures.colours import readable_on_white
from score_centering.figures.law import Law, law
from score_centering.figures.series import across_seeds

FOLDER = Path(__file__).parent
ARM = {"pg": "grpo", "sc": "sc"}  # an uncorrected run is drawn as the arm `grpo` of the preset, which it equals
CONTROL_ENDS = 0.6
CHANCE = 0.05  # reward of a policy that always boxes one number
CELL = ["filler", "sampler", "arm", "lr", "prompts", "grad_clip", "schedule", "optimizer", "normalise", "fresh_noise"]
FEATURES = ["early_k3", "early_entropy", "early_grad_norm", "early_reward", "lr", "prompts", "grad_clip"]


def lost(runs: pd.DataFrame) -> pd.Series:
    """Whether the last 20 steps earn below a quarter of the run's own peak (means of 20 steps) and of 0.6, where the
    control ends."""
    return pd.Series(outcome.lost(runs["reward_last"], runs["reward_peak"], CONTROL_ENDS), runs.index)


def dead(runs: pd.DataFrame) -> pd.Series:
    """Whether the last 20 steps earn below 0.15: a quarter of where the control ends, whatever the run's own peak."""
    return runs["reward_last"] < outcome.LOST_BELOW * CONTROL_ENDS


def comparable(runs: pd.DataFrame) -> pd.DataFrame:
    """Runs of one optimiser whose gradient is clipped where its spikes are, at rates that the control survives."""
    rates = runs["lr"].between(0.75, 1.5)
    return runs[(runs["optimizer"] == "sgd") & rates & (runs["grad_clip"].round(2) == 0.3) & ~runs["fresh_noise"]]


def endings(runs: pd.DataFrame) -> Figure:
    """A point a run: reward of its last 20 steps, by sampler; uncorrected left of score centering."""
    shown = comparable(runs[runs["arm"].isin(list(ARM))])
    order = shown.groupby("sampler")["early_k3"].median().sort_values().index
    looks = styles(["grpo_bf16", "grpo", "sc"])
    figure, grid = axes_row(TWO_COLUMNS, 2.6, 1, left=0.45, bottom=0.75, top=0.25)
    axes, random = grid[0, 0], np.random.default_rng(0)
    for place, sampler in enumerate(order):
        for shift, arm in ((-0.17, "pg"), (0.17, "sc")):
            rewards = shown[(shown["sampler"] == sampler) & (shown["arm"] == arm)]["reward_last"]
            look = looks["grpo_bf16" if sampler == "BF16" else ARM[arm]]
            x = place + shift + random.uniform(-0.09, 0.09, len(rewards))
            label = look.label if (sampler == "BF16" and arm == "pg") or (sampler == order[1]) else None
            axes.plot(x, rewards, "o", markersize=2.6, color=look.colour, alpha=0.7, markeredgewidth=0, label=label)
    axes.axhline(CHANCE, color="#8a8a8a", linewidth=0.7, dashes=(2, 2))
    axes.set_xticks(
        range(len(order)), [name.replace(", ", ",\n").replace(" + ", " +\n").replace("bit ", "bit\n") for name in order]
    )
    axes.set_ylim(0, 0.75)
    axes.set_ylabel("mean reward of the last 20 steps")
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=3, frameon=False, borderaxespad=0.1)
    return figure


def curves(steps: pd.DataFrame) -> Figure:
    """The runs of the product's own trainer: reward by noise and rate, mean and range over seeds."""
    steps = steps[(steps["program"] == "train.py") & (steps["step"] < 320)]  # the last row is one step, not ten
    looks = styles(["grpo_bf16", "grpo", "sc"])
    margin = label_margin([look.label for look in looks.values()])
    panels = [(noise, rate) for noise in ("0.2", "0.25") for rate in (1.0, 1.25)]
    figure, grid = axes_row(
        TWO_COLUMNS, 2.2, len(panels), rows=1, right=margin, top=0.25, gap=0.12, sharex=True, sharey=True
    )
    for axes, (noise, rate) in zip(grid[0], panels, strict=True):
        here, labels = steps[np.isclose(steps["lr"], rate)], []
        for arm, look in looks.items():
            sampler = "BF16" if arm == "grpo_bf16" else f"INT8 + INT4 KV, noise {noise}"
            own = here[(here["sampler"] == sampler) & (here["arm"] == ("sc" if arm == "sc" else "pg"))]
            series = [(run["step"].to_numpy(), run["reward_mean"].to_numpy(float)) for _, run in own.groupby("run")]
            band = across_seeds(series)
            axes.plot(band.steps, band.mean, color=look.colour, dashes=look.dashes)
            axes.fill_between(band.steps, band.low, band.high, color=look.colour, alpha=0.15, linewidth=0)
            labels.append(EndLabel(look.label, readable_on_white(look.colour), band.steps[-1], band.mean[-1]))
        axes.set_ylim(0, 0.7)
        axes.set_title(f"noise {noise}, SGD {rate:g}", loc="left")
        axes.set_xlabel("training step")
    label_ends(grid[0, -1], labels)
    grid[0, 0].set_ylabel("mean reward")
    return figure


def forecast(runs: pd.DataFrame) -> Law:
    """Which uncorrected runs die, from the first five updates' K3, entropy, gradient norm and reward and from rate,
    batch and clip."""
    runs = runs[(runs["arm"] == "pg") & (runs["optimizer"] == "sgd") & ~runs["fresh_noise"] & (runs["steps"] >= 120)]
    cells = ["|".join(map(str, cell)) for _, cell in runs[CELL].iterrows()]
    inputs = runs[FEATURES].fillna(10.0).to_numpy(float)  # no clip: above every norm that was seen
    return law(inputs, dead(runs).to_numpy(float), cells, FEATURES)


def shares(runs: pd.DataFrame, by: list[str]) -> pd.DataFrame:
    """Runs, how many died or were lost, and their mean last reward, grouped."""
    marked = runs.assign(dead=dead(runs), lost=lost(runs))
    grouped = marked.groupby(by, dropna=False)
    return grouped.agg(runs=("dead", "size"), dead=("dead", "sum"), lost=("lost", "sum"), last=("reward_last", "mean"))


def taken_away(runs: pd.DataFrame) -> pd.DataFrame:
    """Uncorrected and centred runs and how many died: with every condition, and with one of them taken away.

    With every condition: noise of 0.2 to 0.3, SGD at 0.75 to 1.5 without decay, gradient clip 0.3.
    """
    runs = runs[runs["arm"].isin(list(ARM)) & ~runs["fresh_noise"]]
    noise, sgd = runs["sampler"].str.contains(r"noise 0\.(?:2|25|3)$"), runs["optimizer"] == "sgd"
    rate, constant = runs["lr"].between(0.75, 1.5), runs["schedule"] == "constant"
    clip = runs["grad_clip"].round(2)
    every = noise & sgd & rate & constant & (clip == 0.3)
    cases = {
        "every condition": every,
        "128 or 256 rollouts a step": every & (runs["prompts"] * runs["n"] < 512),
        "512 rollouts or more": every & (runs["prompts"] * runs["n"] >= 512),
        "less filler (0.4 for 0.6)": every & (runs["filler"] < 0.5),
        "no gradient clip": noise & sgd & rate & constant & clip.isna(),
        "tighter clip (0.1, 0.15)": noise & sgd & rate & constant & (clip < 0.2),
        "rate that decays (cosine)": noise & sgd & rate & (clip == 0.3) & (runs["schedule"] == "cosine"),
        "rate of 0.6": noise & sgd & constant & (runs["lr"] < 0.75),
        "3-bit weights for the noise": (runs["sampler"] == "3-bit weights") & sgd & rate & constant & (clip == 0.3),
        "4-bit weights": (runs["sampler"] == "4-bit weights") & sgd & rate & constant & (clip == 0.3),
        "INT8 + INT4 KV": (runs["sampler"] == "INT8 + INT4 KV") & sgd & rate & constant & (clip == 0.3),
        "BF16": (runs["sampler"] == "BF16") & sgd & rate & constant & (clip == 0.3),
    }
    return outcome.taken_away(runs, cases, {"pg": "uncorrected", "sc": "SC"}, dead(runs), "dead")


def main(output: Path = FOLDER) -> None:
    runs, steps = pd.read_parquet(FOLDER / "runs.parquet"), pd.read_parquet(FOLDER / "exploration.parquet")
    with drawing():
        for name, figure in (("endings", endings(runs)), ("curves", curves(steps))):
            figure.savefig(output / f"{name}.png")
    arms = runs[runs["arm"].isin(list(ARM)) & (runs["optimizer"] == "sgd") & ~runs["fresh_noise"]]
    cells = runs.groupby(CELL, dropna=False)["seed"].nunique()
    print(f"{len(runs)} runs, {len(cells)} cells, {(cells >= 3).sum()} of them with at least 3 seeds\n")
    print("clip 0.3, SGD 0.75 to 1.5:\n", shares(comparable(arms), ["sampler", "arm"]).round(2), "\n")
    print("same, at least 512 rollouts:\n", shares(comparable(arms[arms["prompts"] >= 64]), ["arm"]).round(2), "\n")
    noisy = arms[arms["sampler"].isin(["noise 0.2", "noise 0.3"]) & arms["lr"].between(0.75, 1.5)]
    for one in ("grad_clip", "prompts", "filler", "schedule", "lr"):
        print(f"noise 0.2 and 0.3, SGD 0.75 to 1.5, by {one}:\n", shares(noisy, [one, "arm"]).round(2), "\n")
    control = arms[(arms["sampler"] == "BF16") & (arms["arm"] == "pg") & arms["lr"].between(0.75, 1.5)]
    control = control.assign(spike=control["grad_norm_max"] / control["grad_norm_median"])
    print("control by clip:\n", shares(control, ["grad_clip"]).round(2), "\n")
    worst = control[control["grad_clip"].isna()].sort_values("reward_min").head(8)
    print(worst[["lr", "prompts", "seed", "reward_min", "grad_norm_median", "grad_norm_max"]].round(3), "\n")
    print("128 rollouts, no clip:\n", shares(runs[(runs["prompts"] == 16) & runs["grad_clip"].isna()],
                                             ["sampler", "fresh_noise", "arm", "lr"]).round(2), "\n")  # fmt: skip
    print("AdamW:\n", shares(runs[runs["optimizer"] == "adamw"], ["sampler", "arm"]).round(2), "\n")
    print("one condition taken away:\n", taken_away(runs).to_string(index=False), "\n")
    told = forecast(runs)
    print(
        f"law: area under the curve {told.fitted:.2f} on the fitted half ({told.fitted_runs} runs), "
        f"{told.other:.2f} on the other ({told.other_runs})"
    )


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
