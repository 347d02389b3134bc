"""Figures and tables of the studies, from invented rows."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from safetensors.numpy import save_file

from score_centering.figures.canvas import drawing, save
from score_centering.figures.drift_study import DRIFT, draw_drift, drift_table
from score_centering.figures.fault_study import check_table, draw_faults, fault_table
from score_centering.figures.stale_study import draw_stale, stale_table
from score_centering.figures.sweep_study import draw_sweep, sweep_table

LIMITS = json.dumps({"limits": {"int8_int4kv.k3_kl": {"min": None, "max": 0.0066}}})


def drift_rows(seeds: int = 2) -> pa.Table:
    rows = []
    for sampler in ("online", "frozen"):
        for centering, power in (("exact", 0.5), ("none", 1.0), ("k8", 0.5)):
            for seed in range(seeds):
                for step in range(41):
                    row = {"sampler": sampler, "centering": centering, "seed": seed, "step": step}
                    row["displacement"] = 1e-3 * (1 + 0.1 * seed) * step**power
                    if step % 8 == 0:
                        row["reward_sampled"] = 0.4 - 0.005 * step * power
                        if centering != "exact" and step:
                            row["distance_to_exact"] = 1e-3 * step * power**4
                    rows.append(row)
    return pa.Table.from_pylist(rows, DRIFT)


def check_rows() -> pa.Table:
    rows = [{"kind": "none", "rate": 0.0, "transient": False, "equal_tokens_share": 1.0, "k3_kl": 1e-3}]
    for kind in ("codes", "scale", "nan"):
        for rate in (1e-3, 1e-2, 1e-1):
            for transient in (True, False):
                row = {"kind": kind, "rate": rate, "transient": transient}
                if kind == "nan":
                    row["refusal"] = "local engine: not finite"
                else:
                    row |= {"equal_tokens_share": 1 - 3 * rate * transient, "k3_kl": 1e-3 + rate}
                rows.append(row)
    return check_table(rows, LIMITS)


def runs(synthetic, folder, cells):
    found = []
    for cell in cells:
        for arm in ("grpo", "sc"):
            run = synthetic.write_run(folder / cell, arm, 0, 20)
            moved = folder / "grid" / cell / arm / "seed0"
            moved.parent.mkdir(parents=True)
            found.append(run.rename(moved))
    return found


def test_tables_keep_the_order_and_name_their_cells(synthetic, tmp_path):
    folders = runs(synthetic, tmp_path / "s", ["bf16", "int8_noise"])
    table = sweep_table(folders)
    assert table["precision"].to_pylist() == ["bf16", "bf16", "int8_noise", "int8_noise"]
    assert table["arm"].to_pylist() == ["grpo", "sc"] * 2
    table = fault_table(runs(synthetic, tmp_path / "f", ["none", "codes-0.01"]))
    assert table["rate"].to_pylist() == [0.0, 0.0, 0.01, 0.01]
    assert table["kind"].to_pylist() == ["none", "none", "codes", "codes"]


def stale_runs(synthetic, folder, clean=0.25) -> pa.Table:
    """Two arms with a fresh and a stale sampler, whose trained weights score `clean` in the last validation."""
    folders = runs(synthetic, folder, ["sync1", "sync8-batches4"])
    for run, (sync_every, mini_batches) in zip(folders, [(1, 1)] * 2 + [(8, 4)] * 2, strict=True):
        info = json.loads((run / "run.json").read_text())
        info["identity"]["config"] |= {
            "trainer": {"sync_every": sync_every}, "actor_rollout_ref": {"actor": {"mini_batches": mini_batches}},
        }  # fmt: skip
        (run / "run.json").write_text(json.dumps(info))
        rows = pq.read_table(run / "metrics.parquet")
        measured = pa.array([None] * 10 + [0.9] + [None] * 8 + [clean], pa.float64())
        index = rows.column_names.index("clean_reward_mean")
        pq.write_table(rows.set_column(index, rows.field(index), measured), run / "metrics.parquet")
    return stale_table(folders)


def test_the_stale_table_says_how_each_run_was_trained_and_how_its_weights_ended(synthetic, tmp_path):
    table = stale_runs(synthetic, tmp_path)
    assert table["sync_every"].to_pylist() == [1, 1, 8, 8] and table["mini_batches"].to_pylist() == [1, 1, 4, 4]
    assert table["arm"].to_pylist() == ["grpo", "sc"] * 2
    assert table["clean_reward_last"].to_pylist() == [0.25] * 4


def test_the_stale_figure_shows_the_trained_weights_or_says_that_it_shows_the_rollouts(synthetic, tmp_path):
    with drawing():
        figure = draw_stale(stale_runs(synthetic, tmp_path / "a"))
        texts = [text.get_text() for text in figure.axes[0].texts]
        assert texts.count("0.25") == 4
        assert figure.axes[0].get_title(loc="left").startswith("Reward of the trained weights in BF16 after 20 steps")
        assert [tick.get_text() for tick in figure.axes[0].get_xticklabels()] == ["1", "8, 4 batches"]
        table = stale_runs(synthetic, tmp_path / "b")
        index = table.column_names.index("clean_reward_last")
        unmeasured = draw_stale(table.set_column(index, table.field(index), pa.nulls(4, pa.float64())))
    assert unmeasured.axes[0].get_title(loc="left").startswith("Mean reward of the last 10 of 20 steps")


def figure(synthetic, folder, study):
    if study == "drift":
        return draw_drift(drift_rows())
    if study == "faults":
        cells = ["none", "codes-0.001", "codes-0.1", "scale-0.1"]
        return draw_faults(check_rows(), fault_table(runs(synthetic, folder, cells)))
    if study == "stale":
        return draw_stale(stale_runs(synthetic, folder))
    return draw_sweep(sweep_table(runs(synthetic, folder, ["bf16", "int8", "int8_noise"])))


@pytest.mark.parametrize("study", ["drift", "faults", "sweep", "stale"])
def test_each_figure_is_the_same_bytes_twice(synthetic, tmp_path, study):
    files = []
    with drawing():
        for folder in (tmp_path / "a", tmp_path / "b"):
            files.append([path.read_bytes() for path in save(figure(synthetic, folder, study), folder / study)])
    assert files[0] == files[1] and all(files[0])


def test_distances_from_the_exact_run_of_the_same_sampler_and_seed(tmp_path):
    files = []
    for sampler, shift in (("online", 0.0), ("frozen", 5.0)):
        for centering, offset in (("exact", 0.0), ("none", 3.0)):
            rows = [{"sampler": sampler, "centering": centering, "seed": 0, "step": step} for step in (0, 1, 2)]
            files.append(tmp_path / f"{sampler}-{centering}.parquet")
            pq.write_table(pa.Table.from_pylist(rows, DRIFT), files[-1])
            weights = {
                "2/a": np.full((2, 2), shift + offset, np.float32),
                "2/b": np.full(5, shift + offset, np.float32),
            }
            save_file(weights, files[-1].with_suffix(".safetensors"))
    found = drift_table(files).to_pylist()
    assert [row["distance_to_exact"] for row in found] == [None] * 5 + [9.0] + [None] * 5 + [9.0]


def test_one_seed_draws_too(tmp_path):
    with drawing():
        assert len(save(draw_drift(drift_rows(seeds=1)), tmp_path / "one")) == 3
