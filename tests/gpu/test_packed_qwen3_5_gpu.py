"""Packed rows of Qwen3.5 on a GPU: with flash-linear-attention's kernels where they are installed, else torch's."""

import importlib.util

import pytest
import torch
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

from score_centering.training.verl.worker import packed_qwen3_5  # noqa: F401  installs itself

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

LENGTHS = (130, 70, 1, 33)


def make_model() -> Qwen3_5ForCausalLM:
    torch.manual_seed(0)
    config = Qwen3_5TextConfig(
        vocab_size=512, hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=64,
        linear_value_head_dim=64, initializer_range=0.1, max_position_embeddings=512,
    )  # fmt: skip
    return Qwen3_5ForCausalLM(config).to("cuda", torch.bfloat16)


def pack(samples: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    positions = torch.cat([torch.arange(len(sample), device="cuda") for sample in samples])
    return {"input_ids": torch.cat(samples)[None], "position_ids": positions[None], "use_cache": False}


def test_packed_equals_padded():
    print("flash-linear-attention:", importlib.util.find_spec("fla") is not None)
    model = make_model()
    generator = torch.Generator("cuda").manual_seed(1)
    samples = [torch.randint(512, (length,), generator=generator, device="cuda") for length in LENGTHS]
    pull = [torch.randn(length, 512, generator=generator, device="cuda") for length in LENGTHS]
    width = max(LENGTHS)
    rows = torch.stack([torch.nn.functional.pad(sample, (0, width - len(sample))) for sample in samples])
    logits = model(input_ids=rows, use_cache=False).logits
    padded = [logits[i, :length] for i, length in enumerate(LENGTHS)]
    sum((a.float() * b).sum() for a, b in zip(padded, pull, strict=True)).backward()
    expected = {name: parameter.grad.float() for name, parameter in model.named_parameters()}
    model.zero_grad(set_to_none=True)

    packed = model(**pack(samples)).logits[0].split(LENGTHS)
    sum((a.float() * b).sum() for a, b in zip(packed, pull, strict=True)).backward()
    for a, b in zip(packed, padded, strict=True):
        assert (a - b).abs().mean() <= 0.02 * b.abs().mean()
    for name, parameter in model.named_parameters():
        assert (parameter.grad.float() - expected[name]).norm() <= 0.05 * expected[name].norm(), name


def test_a_sample_does_not_see_its_neighbour():
    model = make_model()
    generator = torch.Generator("cuda").manual_seed(2)
    first, second, other = (torch.randint(512, (n,), generator=generator, device="cuda") for n in (64, 40, 64))
    with torch.no_grad():
        one, two = (model(**pack([before, second])).logits[0, 64:] for before in (first, other))
    assert torch.equal(one, two)
