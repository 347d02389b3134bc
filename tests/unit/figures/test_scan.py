import json
import runpy
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest

from score_centering.figures.scan import find_runs, scan, write_table
from score_centering.figures.summary import OUTCOME, run_row
from score_centering.settings import UserError


def finished(synthetic, folder, arm, seed, config):
    run = synthetic.write_run(folder, arm, seed, 30)
    (run / "run.json").write_text(json.dumps({"identity": {"config": config}}))
    return run


def test_a_row_from_a_data_frame_or_from_arrays(synthetic, tmp_path):
    frame = pq.read_table(synthetic.write_run(tmp_path / "e", "sc", 0, 30) / "metrics.parquet").to_pandas()
    row = run_row(frame)
    assert isinstance(frame, pd.DataFrame) and tuple(row) == OUTCOME
    assert row == run_row({name: np.array(frame[name], float) for name in frame})
    assert row["reward_peak"] >= row["reward_last"] and row["entropy_final"] == 0.0


def test_scan_has_a_row_a_run_and_the_settings_that_differ(synthetic, tmp_path):
    for arm in ("sc", "grpo"):
        for rate, noise in ((1e-3, None), (1e-4, {"weight_noise": 0.1})):
            config = {"trainer": {"steps": 30}, "optim": {"lr": rate}, "mode": {"on": arm == "sc"}, "noise": noise}
            finished(synthetic, tmp_path / f"lr{rate}", arm, 3, config)
    table = scan([tmp_path / "lr0.001", tmp_path / "lr0.0001"])
    rows = table.to_pylist()
    assert len(rows) == 4 == len(find_runs([tmp_path]))
    assert {(row["arm"], row["optim.lr"], row["mode.on"]) for row in rows} == {
        ("sc", 1e-3, "true"), ("sc", 1e-4, "true"), ("grpo", 1e-3, "false"), ("grpo", 1e-4, "false"),
    }  # fmt: skip
    assert [row["noise.weight_noise"] for row in rows] == [0.1, 0.1, None, None]  # lr0.0001 comes first
    assert "trainer.steps" not in table.column_names and {row["seed"] for row in rows} == {3}
    assert table.schema.field("k3_kl_max").metadata[b"unit"] == b"nats/token"
    write_table(table, tmp_path / "a.parquet")
    write_table(scan([tmp_path]), tmp_path / "b.parquet")
    assert (tmp_path / "a.parquet").read_bytes() == (tmp_path / "b.parquet").read_bytes()


def test_a_folder_without_a_finished_run_is_named(tmp_path):
    with pytest.raises(UserError, match="holds no finished run"):
        find_runs([tmp_path])


def test_program(synthetic, tmp_path, monkeypatch, capsys):
    finished(synthetic, tmp_path / "e", "sc", 0, {"lr": 1})
    program = Path(__file__).parents[3] / "workflow/scripts/scan.py"
    monkeypatch.setattr("sys.argv", [str(program), str(tmp_path), "--output", str(tmp_path / "out/scan.parquet")])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(program), run_name="__main__")
    assert ended.value.code == 0 and "1 runs" in capsys.readouterr().out
    assert pq.read_table(tmp_path / "out/scan.parquet").column_names[:3] == ["experiment", "arm", "seed"]


def test_the_figures_of_the_search_are_drawn(tmp_path, monkeypatch):
    folder = Path(__file__).parents[3] / "docs/results/scan"
    monkeypatch.setattr("sys.argv", ["draw.py", str(tmp_path)])
    runpy.run_path(str(folder / "draw.py"), run_name="__main__")
    for name in ("scan.png", "confirm.png", "long.png"):
        assert (tmp_path / name).read_bytes() == (folder / name).read_bytes()
