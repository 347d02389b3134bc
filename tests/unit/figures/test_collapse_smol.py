"""SmolLM2-135M on the collapse's task: the page's counts are the data's, and the rule does what it says."""

import runpy
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

FOLDER = Path(__file__).parents[3] / "docs/results/collapse"


@pytest.fixture(scope="module")
def smol() -> dict:
    return runpy.run_path(str(FOLDER / "smol.py"))


def test_the_page(smol, tmp_path, capsys):
    smol["main"](tmp_path)
    assert (tmp_path / "smol.png").stat().st_size > 10_000
    assert "grpo_bf16" in capsys.readouterr().out
    rows = smol["declared"](pd.read_parquet(FOLDER / "smol.parquet"))
    table = smol["ends"](rows).set_index(["arm", "seed"])
    assert set(table["steps"]) == {77} and set(table["clean_step"]) == {60}
    assert table["lost"].sum() == 0
    assert [table.loc[arm, "held"].sum() for arm in ("grpo", "sc")] == [3, 2]
    text = (FOLDER / "README.md").read_text()
    for arm in ("grpo_bf16", "grpo", "sc"):
        assert ", ".join(f"{value:.2f}" for value in table.loc[arm, "last"]) in text
        assert ", ".join(f"{value:.2f}" for value in table.loc[arm, "clean_last"]) in text
        assert ", ".join(f"{value:.2f}" for value in table.loc[arm, "grad_norm"]) in text


def run(arm: str, rewards: list[float], clean: tuple[float, float]) -> pd.DataFrame:
    steps = np.arange(len(rewards) + 1)
    cleans = [clean[0], *[np.nan] * (len(rewards) - 1), clean[1]]
    table = pd.DataFrame({"part": "declared", "run": f"{arm}-s1", "step": steps, "reward_mean": [np.nan, *rewards]})
    return table.assign(clean_reward_mean=cleans, k3_kl=0.1, entropy=1.0, grad_norm=0.2, drift_share=0.5)


def test_lost_and_held_by_hand(smol):
    """The control ends at 0.6. Of a best of 0.5, 0.1 is below a quarter and 0.13 not; 0.57 is 95 % of 0.6, 0.56 not."""
    control = run("grpo_bf16", [0.6] * 40, (0.5, 0.6))
    cases = [([0.5] * 20 + [0.1] * 20, 0.57, (True, True)), ([0.5] * 20 + [0.13] * 20, 0.56, (False, False))]
    for rewards, clean, expected in cases:
        table = smol["ends"](smol["declared"](pd.concat([control, run("grpo", rewards, (0.3, clean))])))
        row = table.set_index("arm").loc["grpo"]
        assert (row["lost"], row["held"]) == expected


def test_the_shortest_run_sets_the_steps(smol):
    rows = pd.concat([run("grpo_bf16", [0.6] * 40, (0.5, 0.6)), run("sc", [0.6] * 30, (0.5, 0.6))])
    assert smol["declared"](rows).groupby("run")["step"].max().tolist() == [30, 30]
