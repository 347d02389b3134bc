"""Packed rows of Qwen3.5 equal padded ones: log-probs and gradients, by transformers' torch kernels and by ours."""

import pytest
import torch
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig
from transformers.models.qwen3_5 import modeling_qwen3_5 as modeling

from score_centering.precision.bf16 import install_cpu_kernels
from score_centering.training.verl.worker import packed_qwen3_5

LENGTHS = (7, 70, 1, 33)  # below, above, and far below the delta rule's chunk of 64
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.05}
CASES = pytest.mark.parametrize(
    ("dtype", "ours"),
    [(torch.float32, False), (torch.float32, True), (torch.bfloat16, True)],
    ids=["transformers' kernels", "our kernels", "our kernels in BF16"],
)


def make_model(dtype: torch.dtype, ours: bool) -> Qwen3_5ForCausalLM:
    torch.manual_seed(0)
    config = Qwen3_5TextConfig(
        vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=3,
        layer_types=["linear_attention", "full_attention", "linear_attention"], num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, linear_num_key_heads=1, linear_num_value_heads=2, linear_key_head_dim=16,
        linear_value_head_dim=16, initializer_range=0.3, max_position_embeddings=256,
    )  # fmt: skip
    model = Qwen3_5ForCausalLM(config).to(dtype)
    if ours:
        install_cpu_kernels(model)
    return model


def packed_arguments(samples: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    return {
        "input_ids": torch.cat(samples)[None],
        "position_ids": torch.cat([torch.arange(len(sample)) for sample in samples])[None],
    }


def gradients(model: Qwen3_5ForCausalLM) -> dict[str, torch.Tensor]:
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    return found


@CASES
def test_packed_equals_padded(dtype, ours):
    model = make_model(dtype, ours)
    generator = torch.Generator().manual_seed(1)
    samples = [torch.randint(96, (length,), generator=generator) for length in LENGTHS]
    pull = [torch.randn(length, 96, generator=generator, dtype=torch.float64) for length in LENGTHS]

    width = max(LENGTHS)
    rows = torch.stack([torch.nn.functional.pad(sample, (0, width - len(sample))) for sample in samples])
    logits = model(input_ids=rows, use_cache=False).logits
    padded = [logits[i, :length] for i, length in enumerate(LENGTHS)]
    sum((a.double() * b).sum() for a, b in zip(padded, pull, strict=True)).backward()
    expected = gradients(model)

    packed = model(**packed_arguments(samples)).logits[0].split(LENGTHS)
    sum((a.double() * b).sum() for a, b in zip(packed, pull, strict=True)).backward()
    for a, b in zip(packed, padded, strict=True):
        assert (a - b).abs().max() <= TOLERANCE[dtype] * b.abs().max()
    for name, gradient in gradients(model).items():
        assert (gradient - expected[name]).norm() <= TOLERANCE[dtype] * expected[name].norm(), name


@CASES
def test_a_sample_does_not_see_its_neighbour(dtype, ours):
    model = make_model(dtype, ours)
    generator = torch.Generator().manual_seed(2)
    first, second, other = (torch.randint(96, (length,), generator=generator) for length in (9, 12, 9))
    with torch.no_grad():
        after_first, after_other = (
            model(**packed_arguments([before, second])).logits[0, 9:] for before in (first, other)
        )
    assert torch.equal(after_first, after_other)


def test_offsets_follow_from_position_ids():
    keywords = packed_qwen3_5.packing(torch.tensor([[0, 1, 0, 1, 2, 0]]))
    assert keywords["seq_idx"].tolist() == [[0, 0, 1, 1, 1, 2]] and keywords["seq_idx"].dtype == torch.int32
    assert keywords["cu_seq_lens_q"].tolist() == [0, 2, 5, 6] and keywords["cu_seq_lens_q"].dtype == torch.int32
    assert packed_qwen3_5.packing(torch.arange(6)[None]) == {}


def test_without_the_patch_samples_leak(monkeypatch):
    """What the patch is for: transformers alone gives the second sample another logit after another neighbour."""
    monkeypatch.setattr(modeling.Qwen3_5TextModel, "forward", modeling.Qwen3_5TextModel.forward.__wrapped__)
    with pytest.raises(AssertionError):
        test_a_sample_does_not_see_its_neighbour(torch.float32, False)


def test_generation_with_a_cache_is_as_before():
    model = make_model(torch.float32, ours=False)
    prompt = torch.randint(96, (1, 5), generator=torch.Generator().manual_seed(3))
    generated = model.generate(prompt, max_new_tokens=4, do_sample=False, pad_token_id=0)
    again = model(input_ids=generated[:, :-1], use_cache=False).logits[0, 4:].argmax(-1)
    assert torch.equal(again, generated[0, 5:])


def test_installing_twice_changes_nothing():
    before = modeling.Qwen3_5TextModel.forward, modeling.causal_conv1d_fn
    packed_qwen3_5.install()
    assert (modeling.Qwen3_5TextModel.forward, modeling.causal_conv1d_fn) == before
