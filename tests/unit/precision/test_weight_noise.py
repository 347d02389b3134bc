import pytest
import torch

from score_centering.precision.noise import WeightNoise

WEIGHTS = {
    "model.embed_tokens.weight": torch.ones(40, 30),
    "model.layers.0.mlp.up_proj.weight": torch.ones(300, 200, dtype=torch.bfloat16),
    "model.layers.0.norm.weight": torch.ones(30),
    "lm_head.weight": torch.ones(40, 30),
}
MATRIX = "model.layers.0.mlp.up_proj.weight"


def test_noise_is_relative_fixed_and_on_inner_matrices_only():
    noise = WeightNoise(0.1, seed=0)
    noisy = noise.apply(WEIGHTS)
    assert list(noisy) == list(WEIGHTS)
    assert all((noisy[name] is WEIGHTS[name]) == (name != MATRIX) for name in WEIGHTS)
    change = noisy[MATRIX].float() - 1
    assert noisy[MATRIX].dtype == torch.bfloat16
    assert change.std().item() == pytest.approx(0.1, rel=0.02) and abs(change.mean().item()) < 1e-3
    assert torch.equal(noise.apply(WEIGHTS)[MATRIX], noisy[MATRIX])
    assert torch.equal(WeightNoise(0.1, 0).apply(WEIGHTS)[MATRIX], noisy[MATRIX])
    assert not torch.equal(WeightNoise(0.1, 1).apply(WEIGHTS)[MATRIX], noisy[MATRIX])
    doubled = noise.apply({MATRIX: 2 * WEIGHTS[MATRIX]})[MATRIX].float()
    assert (doubled / 2 - noisy[MATRIX].float()).abs().max() < 2**-7


def test_noise_on_the_vocabulary_is_one_for_embedding_and_head():
    noisy = WeightNoise(0.1, seed=0, embedding=True).apply(WEIGHTS)
    embedding, head = noisy["model.embed_tokens.weight"], noisy["lm_head.weight"]
    assert torch.equal(embedding, head)
    assert (embedding - 1).std().item() == pytest.approx(0.1, rel=0.1)
    assert noisy["model.layers.0.norm.weight"] is WEIGHTS["model.layers.0.norm.weight"]
    assert torch.equal(noisy[MATRIX], WeightNoise(0.1, seed=0).apply(WEIGHTS)[MATRIX])


def test_two_matrices_of_one_shape_have_noise_of_their_own():
    """Equal noise in every layer would be a mismatch of another kind."""
    twins = {f"model.layers.{layer}.mlp.up_proj.weight": torch.ones(200, 300) for layer in (0, 1)}
    first, second = (noisy - 1 for noisy in WeightNoise(0.1, seed=0).apply(twins).values())
    assert abs((first * second).mean().item()) < 5 * 0.01 / 60_000**0.5, "correlated"
