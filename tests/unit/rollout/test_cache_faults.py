"""The fault injector: rate and kind as asked for, transient or persistent, and no trace when it is off."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from score_centering.precision import int4_kv, requantise
from score_centering.precision.int8 import FORMAT as INT8
from score_centering.rollout import LocalEngine, Sampling
from score_centering.rollout.local.cache_faults import CacheFaults
from score_centering.settings import UserError

CONFIG = LlamaConfig(
    vocab_size=200,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    initializer_range=0.15,
    tie_word_embeddings=False,
)
W8A8 = {"quantization_config": INT8.quantization_config(["Linear"], ["lm_head"])}
PROMPTS = [[5, 6, 7, 8], [9, 10], [11, 12, 13]]
SAMPLING = Sampling(temperature=1.0, max_tokens=8, greedy=False, stop_token_ids=(3,))


def damaged(kind: str, rate: float = 0.25, transient: bool = True, calls: int = 1, layer: int = 0):
    """Entries before, after, and where they differ (B, M, C)."""
    faults = CacheFaults(rate, kind, transient, seed=3)
    for _ in range(calls):
        faults.begin(4, 17, torch.device("cpu"))
    torch.manual_seed(0)
    packed = int4_kv.encode(torch.randn(500, 4, 2, 16).bfloat16())
    positions = torch.arange(2).expand(500, 2)
    after = faults.damage(packed, torch.arange(500), positions, layer)
    return packed, after, (packed != after).any(-1)


@pytest.mark.parametrize("kind", ["codes", "scale", "nan"])
def test_the_rate_is_kept_and_the_rest_untouched(kind):
    before, after, hit = damaged(kind)
    possible = 16 / 17 if kind == "scale" else 1  # a factor of 2^0 changes nothing
    assert hit.float().mean().item() == pytest.approx(0.25 * possible, abs=0.02)
    assert after.dtype == torch.uint8 and after.shape == before.shape
    assert [damaged(kind, rate)[2].any().item() for rate in (1e-9, 1.0)] == [False, True]


def test_what_each_kind_damages():
    before, after, hit = damaged("codes")
    assert torch.equal(before[..., -4:], after[..., -4:])  # the scale's bytes
    codes = int4_kv.unpack(after[hit])[0]
    assert np.bincount(codes.flatten().numpy(), minlength=16).min() > 0.8 * codes.numel() / 16
    before, after, hit = damaged("scale")
    assert torch.equal(int4_kv.unpack(before)[0], int4_kv.unpack(after)[0])
    ratio = int4_kv.unpack_scale(after[hit])[0] / int4_kv.unpack_scale(before[hit])[0]
    assert set(ratio.log2().tolist()) == {float(e) for e in range(-8, 9) if e}
    _, after, hit = damaged("nan")
    assert torch.equal(int4_kv.unpack_scale(after)[0].isnan(), hit)


def test_transient_faults_move_from_call_to_call_and_persistent_ones_stay():
    first, again, second = damaged("codes")[1], damaged("codes")[1], damaged("codes", calls=2)[1]
    assert torch.equal(first, again) and not torch.equal(first, second)
    steady = damaged("codes", transient=False)[1]
    assert torch.equal(steady, damaged("codes", transient=False, calls=2)[1])
    assert not torch.equal(steady, damaged("codes", transient=False, layer=1)[1])


def test_a_resumed_engine_meets_the_same_faults():
    faults = CacheFaults(0.5, "codes", True, seed=0)

    def keys(*steps: int) -> list[int]:
        made = []
        for step in steps:
            faults.begin(step, 1, torch.device("cpu"))
            made.append(faults._key.item())
        return made

    whole = keys(0, 1, 1, 2)
    assert len(set(whole)) == 4
    assert keys(1, 1, 2) == whole[1:]


def engine(faults: CacheFaults | None, **changes) -> LocalEngine:
    arguments = {"kv_cache": "int4_per_token_head", "quantised_config": W8A8} | changes
    made = LocalEngine(CONFIG, **arguments, max_batch=8, max_prompt_length=8, max_response_length=8, faults=faults)
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(CONFIG, dtype=torch.bfloat16)
    made.sync(requantise({name: p.detach() for name, p in model.named_parameters()}, made.listed), 0)
    return made


def sampled(faulty: LocalEngine) -> list[list[float]]:
    return [r.logprobs.tolist() for r in faulty.generate(PROMPTS, 4, SAMPLING, seed=1, top_logprobs=0)]


def test_the_engine_under_faults():
    healthy = sampled(engine(None))
    assert sampled(engine(CacheFaults(1e-12, "nan", True, 0))) == healthy
    transient, persistent = (engine(CacheFaults(0.3, "codes", kind, 0)) for kind in (True, False))
    first = sampled(transient)
    assert first != healthy and sampled(transient) != first
    first = sampled(persistent)
    assert first != healthy and sampled(persistent) == first
    with pytest.raises(UserError, match="log-prob that is not finite"):
        sampled(engine(CacheFaults(0.3, "nan", True, 0)))


def test_faults_need_an_int4_cache():
    with pytest.raises(UserError, match="faults damage an INT4 cache, but kv_cache is 'auto'"):
        engine(CacheFaults(0.1, "codes", True, 0), kv_cache="auto")
