"""An arm learns, through the real programs: INT8 rollouts, math_verify's rewards, the real update.

Every problem of the training file has the same answer, so a model that answers at random among numbers can only gain by
saying that one more often; it is the simplest thing to learn from rewards alone, and a handful of updates suffice.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from score_centering.precision.int8 import FORMAT as INT8
from score_centering.runs.schema import read_metrics
from score_centering.settings.model_blocks import Quantization

pytestmark = [pytest.mark.workflow, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
DATASET, MODEL = "results/test/dataset/manifest.json", "results/test/model/manifest.json"
STEPS, ROLLOUTS, ENDS = 30, 64, 5
TRAINING = (
    f"trainer.total_training_steps={STEPS}", f"trainer.test_freq={STEPS}", "trainer.val_before_train=true",
    "trainer.save_freq=-1", "data.train_batch_size=8", "actor_rollout_ref.rollout.n=8",
    "actor_rollout_ref.rollout.max_num_seqs=64", "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=64",
    "actor_rollout_ref.actor.optim.lr=1e-3",
)  # fmt: skip


def program(folder: Path, name: str, *arguments: str) -> None:
    command = [sys.executable, ROOT / "workflow/scripts" / name, *arguments]
    command += ["--configfile", "config/test.yaml"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A warm-started model, the layers that run in INT8, and problems that are all answered by 7."""
    folder = tmp_path_factory.mktemp("learning")
    shutil.copytree(ROOT / "config", folder / "config")
    program(folder, "dataset.py", "--output-dir", "results/test/dataset")
    model = ("--dataset-manifest", DATASET, "--output-dir", "results/test/model/base", "--manifest", MODEL)
    program(folder, "model.py", *model)
    listed = INT8.quantization_config(Quantization().targets, Quantization().ignore)
    (folder / "w8a8.json").write_text(json.dumps({"quantization_config": listed}))
    for split in ("train", "test"):
        rows = pq.read_table(folder / f"results/test/dataset/{split}.parquet")
        answers = pa.array(["7"] * len(rows), rows.schema.field("answer").type)
        place = rows.schema.get_field_index("answer")
        pq.write_table(rows.set_column(place, rows.schema.field(place), answers), folder / f"{split}.parquet")
    return folder


@pytest.mark.parametrize("arm", ["sc", "grpo"])
def test_an_arm_learns(folder, arm):
    data = (
        "--train-file",
        "train.parquet",
        "--val-file",
        "test.parquet",
        "--model-manifest",
        MODEL,
        "--quantised-config",
        "w8a8.json",
    )
    program(folder, "train.py", "--baseline", arm, *data, "--run-dir", arm, *TRAINING)
    rows = read_metrics(folder / arm / "metrics.parquet")
    rewards = np.array([reward for reward in rows["reward_mean"].to_pylist() if reward is not None])
    first, last = rewards[:ENDS].mean(), rewards[-ENDS:].mean()
    chance = np.sqrt(2 * 0.25 / (ENDS * ROLLOUTS))  # of a difference between two such means, at most
    assert last - first > 8 * chance, rewards
    clean = [reward for reward in rows["clean_reward_mean"].to_pylist() if reward is not None]
    assert clean[1] > clean[0], "the trained weights themselves are no better"
