"""Tables and figures of the confirmations, of the collapse and of the stale sampler, from confirm.parquet.

python docs/results/collapse/confirm.py            prints the tables, draws confirm.png and ../stale/stale.png
python docs/results/collapse/confirm.py ATTEMPT=FOLDER [ATTEMPT=FOLDER ...]
                                                   writes confirm.parquet from the folders of benchmarks/side_by_side.sh
"""

import json
import sys
from dataclasses import asdict
from pathlib import Path

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from score_centering.figures import outcome
from score_centering.figures.arms import ArmStyle, styles
from score_centering.figures.canvas import TWO_COLUMNS, EndLabel, axes_row, drawing, label_ends, label_margin
from score_centering.figures.colours import readable_on_white
from score_centering.figures.law import area, law
from score_centering.figures.outcome import WINDOW

FOLDER = Path(__file__).parent
TABLE = FOLDER / "confirm.parquet"
COLUMNS = ["reward_mean", "clean_reward_mean", "k3_kl", "entropy", "response_length_mean", "truncated_share"]
FURTHER = ["grad_norm", "drift_norm", "drift_share", "drift_coherence"]
ATTEMPTS = {
    "first": "first: SGD 1.25, clip 0.3",
    "second": "second: SGD 1.5, clip 0.3",
    "third": "third: SGD 1.5, clip 0.5",
}
EARLY = ["k3_kl", "entropy", "grad_norm", "reward_mean"]
DRAWN = ["grpo_bf16", "grpo", "sc"]
STALE = {"grpo": "GRPO", "sc": "SC", "grpo_tis": "TIS", "sc_tis": "SC + TIS", "grpo_mis": "MIS", "sc_mis": "SC + MIS"}
STALE_STEPS = 300
DEAD = 0.15


def collect(attempt: str, folder: Path) -> pd.DataFrame:
    """One row a run and step, step 0 (validation before training) included; the arm and seed are run.json's."""
    runs = []
    for path in sorted(folder.glob("*/metrics.parquet")):
        run = json.loads(path.with_name("run.json").read_text())["identity"]
        table = pd.read_parquet(path, columns=["step", *COLUMNS, *FURTHER])
        table = table.astype({name: "float32" for name in [*COLUMNS, *FURTHER]})
        table.insert(0, "seed", int(run["seed"]))
        table.insert(0, "arm", run["arm"])
        table.insert(0, "cell", path.parent.name.split("-")[0] if "explored" in attempt else "")
        table.insert(0, "attempt", attempt)
        runs.append(table)
    return pd.concat(runs, ignore_index=True)


def verdicts(rows: pd.DataFrame) -> pd.DataFrame:
    """A row a run of an attempt: where it ended, its own peak, its best, and what the declared rules call it.

    last, peak: mean reward of the last 20 steps and the largest mean of 20 steps. best: the larger of peak and the
    clean reward before training. Of the first two attempts *lost* is last < peak / 4 and < the control's last / 4; of
    the third best takes the peak's place. *held*: last >= 95 % of the control's. *healthy*: last >= 90 % of peak.
    """
    runs = []
    for (attempt, arm, seed), run in rows.groupby(["attempt", "arm", "seed"], sort=False):
        start = float(run.loc[run["step"] == 0, "clean_reward_mean"].iloc[0])
        end = outcome.ending(run.sort_values("step")["reward_mean"], start)
        runs.append((attempt, arm, seed, end.last, end.peak, end.best))
    table = pd.DataFrame(runs, columns=["attempt", "arm", "seed", "last", "peak", "best"])
    control = table[table["arm"] == "grpo_bf16"].set_index(["attempt", "seed"])["last"].rename("control")
    table = table.join(control, on=["attempt", "seed"])
    from_its_best = table["best"].where(table["attempt"] == "third", table["peak"])
    table["lost"] = outcome.lost(table["last"], from_its_best, table["control"])
    table["held"] = outcome.held(table["last"], table["control"])
    table["dead"] = table["last"] < DEAD
    table["healthy"] = outcome.healthy(table["last"], table["peak"])
    return table


def summary(table: pd.DataFrame) -> pd.DataFrame:
    """Runs of an attempt's arm: how many were lost, dead, held and healthy; mean and range of where they ended."""
    grouped = table.groupby(["attempt", "arm"], sort=False)
    counts = grouped[["lost", "dead", "held", "healthy"]].sum().astype(int)
    return counts.assign(
        runs=grouped.size(), last=grouped["last"].mean(), low=grouped["last"].min(), high=grouped["last"].max()
    )


def pairs(table: pd.DataFrame) -> tuple[int, int]:
    """In how many seeds score centering ended above the uncorrected arm of the same seed, and of how many."""
    wide = table[table["arm"].isin(["grpo", "sc"])].pivot(index=["attempt", "seed"], columns="arm", values="last")
    return int((wide["sc"] > wide["grpo"]).sum()), len(wide)


def stale(rows: pd.DataFrame) -> pd.DataFrame:
    """The stale sampler's runs: reward of the last 20 steps, the fresh control's at the same steps, dead or holding.

    The control is `grpo_bf16` of the first attempt with the same seed. *holds*: at least three quarters of it.
    """
    control = rows[(rows["attempt"] == "first") & (rows["arm"] == "grpo_bf16")]
    ends = []
    for part in (control, rows[rows["attempt"] == "stale"]):
        last = part[part["step"].between(STALE_STEPS - WINDOW + 1, STALE_STEPS)]
        ends.append(last.groupby(["arm", "seed"])["reward_mean"].mean())
    table = ends[1].rename("last").reset_index()
    table["control"] = table["seed"].map(ends[0].droplevel("arm"))
    return table.assign(dead=table["last"] < DEAD, holds=table["last"] >= 0.75 * table["control"])


def forewarned(rows: pd.DataFrame, steps: int = 100) -> pd.DataFrame:
    """Which of a run's first steps tells that it will be dead: area under the ROC curve of each quantity, by group.

    Means over the first `steps` steps; of the meter's coherence, a running value, the last. Runs that are dead already
    in these steps are in it; groups with fewer than five runs of either kind are left out.
    """
    runs = []
    for (attempt, _, arm, _), run in rows.groupby(["attempt", "cell", "arm", "seed"], sort=False):
        run = run.set_index("step").sort_index()
        early = run.loc[1:steps]
        means = early[["k3_kl", "entropy", "grad_norm", "reward_mean", "drift_norm", "drift_share"]].mean()
        group = "stale sampler" if "stale" in attempt else "noise"
        coherence = float(early["drift_coherence"].dropna().iloc[-1])
        dead = bool(run["reward_mean"].dropna().tail(WINDOW).mean() < DEAD)
        runs.append({"group": group, "arm": arm, "dead": dead, **means, "drift_coherence": coherence})
    table, areas = pd.DataFrame(runs), {}
    groups = {f"{group}, all arms": part for group, part in table.groupby("group")}
    groups |= {f"{group}, uncorrected": part[part["arm"] == "grpo"] for group, part in table.groupby("group")}
    for name, part in groups.items():
        if min(part["dead"].sum(), (~part["dead"]).sum()) >= 5:
            target = part["dead"].to_numpy(float)
            columns = part.drop(columns=["group", "arm", "dead"])
            areas[f"{name} ({part['dead'].sum()} of {len(part)} dead)"] = {
                column: area(columns[column].to_numpy(float), target) for column in columns
            }
    return pd.DataFrame(areas).T


def early_law(rows: pd.DataFrame) -> pd.DataFrame:
    """Which runs with noise will be dead, from their first five updates: the law with the drift meter and without.

    Means over steps 1 to 5; of the meter the norm and share of step 1, where its coherence is 1 by definition. Fitted
    on half of the seeds, tested on the others. Returns a row a group and set of features, areas under the curve.
    """
    runs = []
    noisy = rows[~rows["attempt"].str.startswith("stale")]
    for (*_, arm, seed), run in noisy.groupby(["attempt", "cell", "arm", "seed"], sort=False):
        run = run.set_index("step").sort_index()
        early = run.loc[1:5, [*EARLY, "drift_norm", "drift_share"]].mean()
        dead = run["reward_mean"].dropna().tail(WINDOW).mean() < DEAD
        runs.append({"arm": arm, "seed": f"seed {seed}", "dead": float(dead), **early})
    table, found = pd.DataFrame(runs), []
    for group, part in {"all arms": table, "uncorrected": table[table["arm"] == "grpo"]}.items():
        for features in (EARLY, [*EARLY, "drift_norm", "drift_share"]):
            made = law(part[features].to_numpy(float), part["dead"].to_numpy(), part["seed"].tolist(), features)
            found.append({"runs": group, "with the meter": len(features) > len(EARLY), **asdict(made)})
    return pd.DataFrame(found).drop(columns="weights")


def draw(axes: Axes, runs: pd.DataFrame, look: ArmStyle, label: str) -> EndLabel:
    """The runs of one arm, a line each and their mean, thick, all as means of 20 steps; the label of its end."""
    wide = runs.pivot(index="step", columns="seed", values="reward_mean").dropna().rolling(WINDOW).mean().dropna()
    axes.plot(wide.index, wide, color=look.colour, linewidth=0.5, alpha=0.45)
    mean = wide.mean(axis=1)
    axes.plot(mean.index, mean, color=look.colour, dashes=look.dashes)
    return EndLabel(label, readable_on_white(look.colour), mean.index[-1], mean.iloc[-1])


def finish(axes: Axes) -> None:
    axes.set_ylim(0, 0.7)
    axes.set_xlabel("training step")


def figure(rows: pd.DataFrame) -> Figure:
    """A line a run, means of 20 steps; a panel an attempt; the thick line is the mean over seeds."""
    looks = styles(DRAWN)
    margin = label_margin([look.label for look in looks.values()])
    drawn, grid = axes_row(
        TWO_COLUMNS, 2.3, len(ATTEMPTS), rows=1, right=margin, top=0.25, gap=0.12, sharex=True, sharey=True
    )
    for axes, (attempt, title) in zip(grid[0], ATTEMPTS.items(), strict=True):
        runs = rows[rows["attempt"] == attempt]
        labels = [draw(axes, runs[runs["arm"] == arm], look, look.label) for arm, look in looks.items()]
        axes.set_title(title, loc="left")
        finish(axes)
    label_ends(grid[0, -1], labels)
    grid[0, 0].set_ylabel("mean reward, 20 steps")
    return drawn


def stale_figure(rows: pd.DataFrame) -> Figure:
    """A panel a pair of arms without and with centering: a line a run, means of 20 steps; thick: their mean."""
    arms, looks = list(STALE), styles(["grpo_bf16", *STALE])
    margin = label_margin(list(STALE.values()))
    drawn, grid = axes_row(TWO_COLUMNS, 2.3, 3, rows=1, right=margin, top=0.25, gap=margin, sharex=True, sharey=True)
    runs = rows[rows["attempt"] == "stale"]
    for axes, pair in zip(grid[0], (arms[:2], arms[2:4], arms[4:]), strict=True):
        labels = [draw(axes, runs[runs["arm"] == arm], looks[arm], STALE[arm]) for arm in pair]
        finish(axes)
        label_ends(axes, labels)
    grid[0, 0].set_ylabel("mean reward, 20 steps")
    return drawn


def main(output: Path = FOLDER, stale_output: Path = FOLDER.parent / "stale") -> None:
    rows = pd.read_parquet(TABLE)
    table = verdicts(rows[rows["attempt"].isin(list(ATTEMPTS))])
    with drawing():
        figure(rows).savefig(output / "confirm.png")
        stale_figure(rows).savefig(stale_output / "stale.png")
    print(summary(table).round(3).to_string(), "\n")
    print("sc above grpo of the same seed: {} of {}\n".format(*pairs(table)))
    print(table.pivot(index=["attempt", "seed"], columns="arm", values="last").round(3).to_string(), "\n")
    ends = stale(rows)
    grouped = ends.groupby("arm")
    print(
        grouped[["dead", "holds"]].sum().assign(runs=grouped.size(), last=grouped["last"].mean().round(3)).to_string()
    )
    print(ends.pivot(index="seed", columns="arm", values="last").assign(control=ends.groupby("seed")["control"].first())
          .round(3).to_string(), "\n")  # fmt: skip
    print(forewarned(rows).round(2).to_string(), "\n")
    print(early_law(rows).round(2).to_string(index=False))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        attempts = [collect(name, Path(folder)) for name, folder in (word.split("=") for word in sys.argv[1:])]
        pd.concat(attempts, ignore_index=True).to_parquet(TABLE, compression="zstd", compression_level=19, index=False)
    else:
        main()
