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
from score_centering.figures.sweep_study import heat_map, sweep_table

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


def figure(synthetic, folder, study):
    if study == "drift":
        return draw_drift(drift_rows())
    if study == "faults":
        cells = ["none", "codes-0.001", "codes-0.1", "scale-0.1"]
        return draw_faults(check_rows(), fault_table(runs(synthetic, folder, cells)))
    return heat_map(sweep_table(runs(synthetic, folder, ["bf16", "int8", "int8_noise"])))


@pytest.mark.parametrize("study", ["drift", "faults", "sweep"])
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
