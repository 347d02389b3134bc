"""The inputs of a run at the size of config/test.yaml."""

import json
from pathlib import Path

import pytest

from score_centering.data import Problem
from score_centering.model.scratch import build_model, train_tokenizer
from score_centering.precision.int8 import FORMAT as INT8
from score_centering.settings import load_settings
from score_centering.training.task import Inputs

ROOT = Path(__file__).parents[3]
W8A8 = {"quantization_config": INT8.quantization_config(["Linear"], ["lm_head", "re:.*in_proj_[ab]$"])}


@pytest.fixture(scope="session")
def small_inputs(tmp_path_factory) -> Inputs:
    """A model with fresh weights, and sums to solve: 28 of the training split, 8 of the other."""
    folder = tmp_path_factory.mktemp("model")
    problems = [Problem(f"{a} + {b} =", str(a + b), f"{a}-{b}", "test") for a in range(6) for b in range(6)]
    settings = load_settings([ROOT / "config/config.yaml", ROOT / "config/test.yaml"])
    texts = [f"{problem.prompt}\n{settings.prompt.instruction} {problem.answer}" for problem in problems]
    tokenizer = train_tokenizer(texts, settings.model.scratch.tokenizer.vocab_size)
    tokenizer.save_pretrained(folder)
    build_model(settings.model.scratch, tokenizer).bfloat16().save_pretrained(folder)
    (folder / "w8a8.json").write_text(json.dumps(W8A8))
    return Inputs(problems[:28], problems[28:], folder, folder / "w8a8.json")
