"""The whole measurement on a tiny Qwen3.5, with an engine that is transformers' own forward."""

import math

import numpy as np
import pytest
import torch

from score_centering.figures.canvas import drawing, save
from score_centering.figures.validation_page import page
from score_centering.precision.registry import Precision
from score_centering.rollout import Sampling
from score_centering.validation.measure import Plan, Quantised, Subject, greedy_agreement, measure

PROMPTS = [[5, 9, 17], [3, 44, 21, 60], [30]]


@pytest.fixture(scope="module")
def subject(tiny_qwen):
    return Subject(
        model=tiny_qwen.model,
        base=tiny_qwen.base,
        quantised={"int8": Quantised(tiny_qwen.w8a8, tiny_qwen.listed)},
        prompts=PROMPTS,
        stop_token_ids=(0,),
        read=lambda rollouts: ([f"\\boxed{{{r.token_ids[0]}}}" for r in rollouts], [False] * len(rollouts)),
        answerable_share=0.625,
    )


PLAN = Plan(
    rollouts=2,
    max_tokens=3,
    temperature=1.0,
    seed=3,
    head_sizes=[4, 16, 64],
    drift_tokens=10,
    batch_size=4,
    device="cpu",
    precisions=[Precision(None, "auto"), Precision("int8", "auto"), Precision("int8", "int4_per_token_head")],
)
PRECISIONS = [precision.name for precision in PLAN.precisions]
PRECISIONS_BY_NAME = {precision.name: precision for precision in PLAN.precisions}


@pytest.fixture(scope="module")
def result(subject, emulated_engine):
    engines = []

    def make_engine(precision):
        engines.append(emulated_engine(subject.model, subject.quantised["int8"].listed, precision))
        return engines[-1]

    result = measure(subject, PLAN, make_engine, poison=lambda device: None)
    assert len(engines) == 3 and all(engine.closed for engine in engines)
    return result


def test_every_number_is_finite_and_every_precision_has_the_same_names(result):
    numbers = result["numbers"]
    assert all(math.isfinite(value) for value in numbers.values())
    names = {p: {n.removeprefix(f"{p}.") for n in numbers if n.startswith(f"{p}.")} for p in PRECISIONS}
    names["int8"] -= {name for name in names["int8"] if name.startswith(("checkpoint.", "weights."))}
    assert names["bf16"] < names["int8"] < names["int8_int4kv"]
    assert {n for n in names["int8_int4kv"] - names["int8"]} == {"kv.key_relative", "kv.value_relative"}


def test_a_bf16_engine_agrees_with_the_trainer(result):
    numbers = result["numbers"]
    assert numbers["bf16.k3_kl"] < 1e-3
    assert numbers["bf16.k3_kl"] < numbers["int8.k3_kl"] < numbers["int8_int4kv.k3_kl"]
    assert numbers["bf16.drift.lm_head.uncentered"] < numbers["int8.drift.lm_head.uncentered"]


def test_an_engine_of_these_formats_agrees_with_the_emulation(result):
    for precision in ("int8", "int8_int4kv"):
        emulated = result["numbers"][f"{precision}.emulation.abs_logprob_gap_mean"]
        assert emulated < 0.5 * result["numbers"][f"{precision}.abs_logprob_gap_mean"]


def test_centering_with_the_whole_vocabulary_leaves_no_drift(result):
    for precision in ("int8", "int8_int4kv"):
        for space in ("lm_head", "hidden", "parameters"):
            shares = [result["numbers"][f"{precision}.drift_share.{space}.k{k}"] for k in (4, 16, 64)]
            assert shares[2] < 0.02 and shares[2] < shares[1] < 1


def test_the_task_is_measured_in_every_precision(result, subject, emulated_engine):
    numbers = result["numbers"]
    assert numbers["task.answerable_share"] == 0.625
    engine = emulated_engine(subject.model, subject.quantised["int8"].listed, PRECISIONS_BY_NAME["bf16"])
    engine.sync(subject.base, 0)
    rollouts = engine.generate(PROMPTS, PLAN.rollouts, Sampling(1.0, PLAN.max_tokens, False, (0,)), PLAN.seed, 0)
    surprises = [-float(value) for rollout in rollouts for value in rollout.logprobs]
    assert numbers["bf16.entropy"] == pytest.approx(sum(surprises) / len(surprises), rel=1e-6)
    assert numbers["bf16.response_length_mean"] == len(surprises) / len(rollouts)
    for precision in PRECISIONS:
        assert 0 < numbers[f"{precision}.entropy"] < math.log(64)
        tokens = numbers[f"{precision}.positions"]
        assert numbers[f"{precision}.response_length_mean"] == pytest.approx(tokens / (len(PROMPTS) * PLAN.rollouts))


def test_head_masses_cover_the_vocabulary(result):
    assert result["numbers"]["int8.head_mass_sampler.k64"] == pytest.approx(1, abs=1e-3)
    assert result["numbers"]["int8.head_mass_trainer.k64"] == pytest.approx(1, abs=1e-5)


def test_the_repeat_and_the_checkpoint_are_clean(result):
    numbers = result["numbers"]
    for precision in PRECISIONS:
        assert numbers[f"{precision}.repeat.equal_tokens_share"] == 1
        assert numbers[f"{precision}.repeat.max_logprob_difference"] == 0
        assert numbers[f"{precision}.repeat.not_finite_logprobs"] == 0
    assert numbers["int8.checkpoint.mismatched_codes"] == numbers["int8.checkpoint.mismatched_scales"] == 0
    assert numbers["int8.checkpoint.changed_unlisted_tensors"] == 0
    assert 0.9 < numbers["int8.checkpoint.quantised_weight_share"] < 1


def test_the_model_comes_back_as_it_was(result, tiny_qwen):
    ids = torch.tensor([PROMPTS[0]])
    with torch.no_grad():
        before = tiny_qwen.model(ids, use_cache=False).logits
    assert all(
        torch.equal(tiny_qwen.base[n], t) for n, t in tiny_qwen.model.state_dict().items() if n in tiny_qwen.base
    )
    assert torch.isfinite(before).all()
    assert all(p.grad is None for p in tiny_qwen.model.parameters())


def test_the_page_of_figures_is_the_same_bytes_twice(result, tmp_path):
    with drawing():
        first, second = (save(page(result), folder / "validation") for folder in (tmp_path, tmp_path / "again"))
    assert [path.name for path in first] == ["validation.png", "validation.svg", "validation.pdf"]
    for one, other in zip(first, second, strict=True):
        assert one.read_bytes() == other.read_bytes()


def test_greedy_agreement_by_hand(subject):
    class R:
        def __init__(self, *ids):
            self.token_ids = np.array(ids, dtype=np.int32)

    texts = {1: "\\boxed{7}", 2: "\\boxed{8}", 3: "no answer"}

    def read(rollouts):
        return [texts[rollout.token_ids[0]] for rollout in rollouts], [False] * len(rollouts)

    agreement = greedy_agreement(read, [R(1), R(2), R(3), R(1, 5)], [R(1), R(1), R(3), R(1, 6)])
    assert agreement == pytest.approx(
        {"greedy_answer_agreement": 2 / 3, "greedy_answered_share": 3 / 4, "greedy_response_agreement": 2 / 4}
    )
