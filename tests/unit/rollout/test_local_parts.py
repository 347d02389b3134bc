"""The local engine's parts against plain references."""

import numpy as np
import pytest
import torch

from score_centering.precision import int4_kv
from score_centering.rollout import candidates, streams
from score_centering.rollout.local import forward
from score_centering.rollout.local import sampling as choose


def uniforms(seed: int, prompts: np.ndarray, samples: np.ndarray, positions: int) -> np.ndarray:
    return streams.uniforms(streams.streams(seed, prompts, samples), positions)


def test_draw_follows_the_distribution():
    generator = torch.Generator().manual_seed(0)
    logprobs = torch.log_softmax(torch.randn(1, 700, generator=generator) * 2, dim=-1)
    logprobs[0, 100:200] = -torch.inf
    logprobs = torch.log_softmax(logprobs, dim=-1)
    draws = 40_000
    uniform = torch.from_numpy(uniforms(3, np.arange(draws), np.zeros(draws), 1)[:, 0])
    tokens = choose.draw(logprobs.expand(draws, -1), uniform)
    assert not ((tokens >= 100) & (tokens < 200)).any()
    expected = logprobs[0].exp().double().numpy() * draws
    counts = np.bincount(tokens.numpy(), minlength=700)
    large = expected > 20
    chi2 = ((counts[large] - expected[large]) ** 2 / expected[large]).sum()
    assert abs(chi2 - large.sum()) < 5 * np.sqrt(2 * large.sum())


def test_draw_is_the_inverse_of_the_cumulative_distribution():
    logprobs = torch.log(torch.tensor([[0.0, 0.25, 0.5, 0.0, 0.25, 0.0]])).expand(5, -1)
    uniform = torch.tensor([0.0, 0.2, 0.3, 0.76, 1 - 2.0**-52], dtype=torch.float64)
    assert choose.draw(logprobs, uniform).tolist() == [1, 1, 2, 4, 4]


def test_draw_over_many_blocks_is_the_inverse_of_the_cumulative_distribution():
    """Uniform numbers just above and below each token's boundary, 4,000 tokens, against NumPy's own search."""
    generator = torch.Generator().manual_seed(1)
    logprobs = torch.log_softmax(torch.randn(1, 4000, generator=generator), dim=-1)
    cdf = logprobs[0].exp().double().cumsum(0).numpy()
    cdf /= cdf[-1]
    between = np.concatenate([[0.0], cdf[:-1]]) + np.diff(cdf, prepend=0.0) * np.array([[0.1], [0.9]])
    tokens = choose.draw(logprobs.expand(8000, -1), torch.from_numpy(between.ravel()))
    assert tokens.tolist() == [*range(4000)] * 2


def test_streams_by_another_implementation():
    """SplitMix64 in Python's whole numbers: the key of (seed, prompt, sample), in order; 52 bits a position."""
    mask, golden = 2**64 - 1, 0x9E3779B97F4A7C15

    def mix(x: int) -> int:
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & mask
        x = (x ^ x >> 27) * 0x94D049BB133111EB & mask
        return x ^ x >> 31

    for seed, prompt, sample in ((11, 0, 3), (11, 3, 0), (2**40, 7, 7)):
        key = seed
        for counter in (prompt, sample):
            key = mix(key + golden & mask) ^ mix(counter + 1)
        found = streams.streams(seed, np.array([prompt]), np.array([sample]))
        assert found.tolist() == [key]
        own = [(mix(mix(key + golden & mask) + golden * n & mask) >> 12) * 2.0**-52 for n in (1, 2, 3)]
        assert streams.uniforms(found, 3)[0].tolist() == own


def test_uniforms_are_keyed_by_seed_prompt_sample_and_position():
    prompts, samples = np.repeat(np.arange(40), 5), np.tile(np.arange(5), 40)
    table = uniforms(11, prompts, samples, 30)
    assert (table >= 0).all() and (table < 1).all()
    assert len(np.unique(table)) == table.size
    np.testing.assert_array_equal(table[7:9, :4], uniforms(11, prompts[7:9], samples[7:9], 4))
    assert not np.isin(uniforms(12, prompts, samples, 30), table).any()
    assert abs(table.mean() - 0.5) < 0.02 and abs(np.corrcoef(table[:-1].ravel(), table[1:].ravel())[0, 1]) < 0.05


@pytest.mark.parametrize(("vocab", "count"), [(50, 50), (50, 7), (5000, 20), (5003, 3)])
def test_head_is_top_k(vocab, count):
    logprobs = torch.log_softmax(torch.randn(6, vocab, generator=torch.Generator().manual_seed(1)), dim=-1)
    values, ids = choose.head(logprobs, count)
    torch.testing.assert_close(values, torch.topk(logprobs, count).values, rtol=0, atol=0)
    torch.testing.assert_close(logprobs.gather(1, ids), values, rtol=0, atol=0)


def test_the_grid_is_the_same_for_tensors():
    logprobs = -torch.rand(2000, generator=torch.Generator().manual_seed(0)) * 70
    logprobs[:3] = torch.tensor([0.0, -torch.inf, -1 / 2048])
    rounded = choose.round_to_grid(logprobs).numpy()
    np.testing.assert_array_equal(rounded, candidates.round_logprobs(logprobs.numpy()))
    assert not np.signbit(rounded[0])


def test_head_breaks_ties_by_id():
    _, ids = choose.head(torch.log(torch.tensor([[0.25, 0.25, 0.0, 0.25, 0.25]])), 3)
    assert ids.tolist() == [[0, 1, 3]]


def delta_reference(query, key, value, decay, beta, state):
    """The recurrence token by token: query, key (C, Dk), value (C, Dv), decay, beta (C,), state (Dk, Dv), float64."""
    outputs = []
    for q, k, v, g, b in zip(query, key, value, decay, beta, strict=True):
        state = state * g.exp()
        state = state + torch.outer(k, b * (v - k @ state))
        outputs.append(q @ state * query.shape[-1] ** -0.5)
    return torch.stack(outputs), state


@pytest.mark.parametrize("length", [1, 6])
def test_delta_rule_equals_the_recurrence(length):
    generator = torch.Generator().manual_seed(length)
    batch, key_heads, heads, key_size, value_size = 2, 2, 4, 8, 4
    query_key = torch.nn.functional.normalize(
        torch.randn(batch, length, 2, key_heads, key_size, generator=generator), dim=-1
    )
    value = torch.randn(batch, length, heads, value_size, generator=generator)
    decay = -torch.rand(batch, length, heads, generator=generator)
    beta = torch.rand(batch, length, heads, generator=generator)
    state = torch.randn(batch, heads, key_size, value_size, generator=generator)
    start = state.clone()
    rule = forward.delta_step if length == 1 else forward.delta_prefill
    out = rule(query_key, value, decay, beta, state)
    for b in range(batch):
        for h in range(heads):
            query, key = query_key[b, :, :, h // 2].double().unbind(1)
            expected, expected_state = delta_reference(
                query,
                key,
                value[b, :, h].double(),
                decay[b, :, h].double(),
                beta[b, :, h].double(),
                start[b, h].double(),
            )
            torch.testing.assert_close(out[b, :, h].double(), expected, rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(state[b, h].double(), expected_state, rtol=1e-4, atol=1e-5)


def test_tokens_that_are_not_valid_leave_no_trace_in_the_states():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 6, 5, generator=generator).bfloat16()
    weight = torch.randn(4, 5, generator=generator)
    valid = torch.arange(6) < torch.tensor([[2], [6]])
    long, short = torch.zeros(2, 3, 5, dtype=torch.bfloat16), torch.zeros(1, 3, 5, dtype=torch.bfloat16)
    out = forward.convolve(x, weight, long, valid)
    torch.testing.assert_close(out[:1, :2], forward.convolve(x[:1, :2], weight, short, None), rtol=0, atol=0)
    torch.testing.assert_close(long[:1], short, rtol=0, atol=0)
    torch.testing.assert_close(long[1], x[1, 3:], rtol=0, atol=0)


@pytest.mark.parametrize("packed", [False, True], ids=["bf16", "int4"])
def test_attention_reads_the_cache(packed):
    """Against a float64 softmax over what the cache holds, decoded by the number format's own functions."""
    generator = torch.Generator().manual_seed(0)
    batch, heads, kv_heads, size, positions = 3, 4, 2, 16, 9
    history = torch.randn(batch, 2 * kv_heads, positions, size, generator=generator).bfloat16()
    kv = int4_kv.encode(history) if packed else history.clone()
    new = torch.randn(batch, heads + 2 * kv_heads, 1, size, generator=generator).bfloat16()
    at = torch.tensor([0, 4, 8])
    hidden = (torch.arange(positions) > at[:, None])[:, None, None]
    step = forward.Step(
        rows=torch.arange(batch),
        positions=at[:, None],
        valid=None,
        hidden=hidden,
        cos=torch.empty(0),
        sin=torch.empty(0),
    )
    out = forward.attend(new, heads, kv, step).double()
    held = int4_kv.unrotate(int4_kv.decode(kv)).double() if packed else kv.double()
    for b in range(batch):
        for h in range(heads):
            key, value = held[b, h // 2, : at[b] + 1], held[b, kv_heads + h // 2, : at[b] + 1]
            weight = torch.softmax(key @ new[b, h, 0].double() * size**-0.5, dim=0)
            torch.testing.assert_close(out[b, h, 0], weight @ value, rtol=0.02, atol=0.02)
    written = new[torch.arange(batch), heads:, 0]
    expected = int4_kv.encode(written) if packed else written
    torch.testing.assert_close(kv[torch.arange(batch), :, at], expected, rtol=0, atol=0)
