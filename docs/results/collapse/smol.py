"""Table and figure of SmolLM2-135M on the collapse's task, from smol.parquet.

python docs/results/collapse/smol.py                     prints the tables, draws smol.png
python docs/results/collapse/smol.py explored=FOLDER declared=FOLDER
                                                         writes smol.parquet from the folders of
                                                         benchmarks/side_by_side.sh, ended or not
"""

import sys
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from score_centering.figures.arms import styles
from score_centering.figures.canvas import TWO_COLUMNS, EndLabel, axes_row, drawing, label_ends, label_margin
from score_centering.figures.colours import readable_on_white
from score_centering.runs.log import read_log

FOLDER = Path(__file__).parent
TABLE = FOLDER / "smol.parquet"
ARMS = ["grpo_bf16", "grpo", "sc"]
COLUMNS = ["reward_mean", "clean_reward_mean", "k3_kl", "entropy", "response_length_mean", "truncated_share",
           "grad_norm", "drift_norm", "drift_share", "drift_coherence"]  # fmt: skip
PANELS = {"reward_mean": "mean reward", "grad_norm": "gradient norm", "k3_kl": "K3 KL, nats a token"}
WINDOW = 20


def collect(part: str, folder: Path) -> pd.DataFrame:
    """One row a run and step, from the runs' step logs: they were stopped before they had published anything.

    A folder is named after its run, as the lists of side_by_side.sh name it; a declared one `<arm>-s<seed>`.
    """
    runs = []
    for path in sorted(folder.glob("*/state/steps.log")):
        steps = [{"step": row["step"], **{name: row["metrics"].get(name) for name in COLUMNS}}
                 for row in read_log(path)]  # fmt: skip
        if steps:
            runs.append(pd.DataFrame(steps).astype({name: "float32" for name in COLUMNS}))
            runs[-1].insert(0, "run", path.parents[1].name)
            runs[-1].insert(0, "part", part)
    return pd.concat(runs, ignore_index=True)


def declared(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows of the declared runs up to the last step that all of them have made, with arm and seed."""
    rows = rows[rows["part"] == "declared"]
    common = rows.groupby("run")["step"].max().min()
    names = rows["run"].str.rsplit("-s", n=1)
    rows = rows.assign(arm=names.str[0], seed=names.str[1].astype(int))
    return rows[rows["step"] <= common]


def ends(rows: pd.DataFrame) -> pd.DataFrame:
    """A row a declared run: means of its last 20 steps, its peak (means of 20), its last clean reward, and the rule.

    *lost*: last below a quarter of the best it had (the clean reward at the start counts) and of the control's last.
    *held*: the last clean reward is at least 95 % of the control's.
    """
    runs = []
    for (arm, seed), run in rows.groupby(["arm", "seed"], sort=False):
        run = run.set_index("step").sort_index()
        means, clean = run["reward_mean"].dropna().rolling(WINDOW).mean().dropna(), run["clean_reward_mean"].dropna()
        runs.append({
            "arm": arm, "seed": seed, "steps": int(run.index[-1]), "last": means.iloc[-1], "peak": means.max(),
            "clean_first": clean.iloc[0], "clean_last": clean.iloc[-1], "clean_step": clean.index[-1],
            **{name: run[name].tail(WINDOW).mean() for name in ("k3_kl", "entropy", "grad_norm", "drift_share")},
        })  # fmt: skip
    table = pd.DataFrame(runs)
    control = table[table["arm"] == "grpo_bf16"].set_index("seed")[["last", "clean_last"]].add_prefix("control_")
    table = table.join(control, on="seed")
    best = table[["peak", "clean_first"]].max(axis=1)
    table["lost"] = (table["last"] < best / 4) & (table["last"] < table["control_last"] / 4)
    table["held"] = table["clean_last"] >= 0.95 * table["control_clean_last"]
    return table.drop(columns=["control_last", "control_clean_last"])


def figure(rows: pd.DataFrame) -> Figure:
    """A panel a quantity: a line a run, means of 5 steps, and the mean of its arm, thick."""
    looks = styles(ARMS)
    margin = label_margin([look.label for look in looks.values()])
    drawn, grid = axes_row(TWO_COLUMNS, 2.3, len(PANELS), rows=1, right=margin, top=0.25, gap=0.5, sharex=True)
    for axes, (column, title) in zip(grid[0], PANELS.items(), strict=True):
        labels = []
        for arm, look in looks.items():
            wide = rows[rows["arm"] == arm].pivot(index="step", columns="seed", values=column)
            wide = wide.loc[1:].rolling(5).mean().dropna()
            axes.plot(wide.index, wide, color=look.colour, linewidth=0.5, alpha=0.45)
            mean = wide.mean(axis=1)
            axes.plot(mean.index, mean, color=look.colour, dashes=look.dashes)
            labels.append(EndLabel(look.label, readable_on_white(look.colour), mean.index[-1], mean.iloc[-1]))
        axes.set_ylim(bottom=0)
        axes.set_title(title, loc="left")
        axes.set_xlabel("training step")
    label_ends(grid[0, -1], labels)
    return drawn


def main(output: Path = FOLDER) -> None:
    rows = pd.read_parquet(TABLE)
    chosen = declared(rows)
    with drawing():
        figure(chosen).savefig(output / "smol.png")
    print(ends(chosen).round(3).to_string(index=False), "\n")
    explored = rows[(rows["part"] == "explored") & (rows["step"] > 0)]
    means = explored.sort_values("step").groupby("run", sort=False)
    last = means[["reward_mean", "k3_kl", "entropy", "grad_norm"]].agg(lambda values: values.tail(10).mean())
    print(last.assign(steps=means["step"].max()).round(3).to_string())


if __name__ == "__main__":
    if len(sys.argv) > 1:
        parts = [collect(name, Path(folder)) for name, folder in (word.split("=") for word in sys.argv[1:])]
        pd.concat(parts, ignore_index=True).to_parquet(TABLE, index=False, compression="zstd")
    main()
