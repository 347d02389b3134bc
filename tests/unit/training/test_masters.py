import copy

import pytest
import torch
from torch import nn

from score_centering.settings.training_blocks import Optim
from score_centering.training.masters import MasterWeights


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16, bias=False), nn.SiLU(), nn.Linear(16, 4, bias=False)).bfloat16()


def backward(model: nn.Module, x: torch.Tensor) -> None:
    model(x.bfloat16()).float().square().mean().backward()


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_updates_smaller_than_a_bf16_step_add_up(name):
    """One update of 1e-5 vanishes in BF16; the masters keep it until the rounded weight moves."""
    model = net()
    masters = MasterWeights(model, Optim(name=name, lr=1e-5))
    before = copy.deepcopy(model.state_dict())
    first = masters.masters["0.weight"].clone()
    for update in range(1, 3):
        backward(model, torch.ones(2, 8))
        masters.collect()
        masters.step(update)
    assert not torch.equal(masters.masters["0.weight"], first)
    for key, value in model.state_dict().items():
        assert torch.equal(value, masters.masters[key].bfloat16())
    if name == "sgd":
        assert torch.equal(model.state_dict()["0.weight"], before["0.weight"])


def test_gradients_of_micro_batches_add_up_in_fp32():
    """257 gradients of 1 make 257; in BF16 the sum would stop at 256."""
    layer = nn.Linear(1, 1, bias=False).bfloat16()
    masters = MasterWeights(layer, Optim(lr=1.0))
    for _ in range(257):
        layer.weight.grad = torch.ones_like(layer.weight)
        masters.collect()
    assert masters.masters["weight"].grad.item() == 257
    assert layer.weight.grad is None


def test_clip_returns_the_norm_before_and_scales():
    layer = nn.Linear(2, 1, bias=False).bfloat16()
    masters = MasterWeights(layer, Optim(lr=1.0))
    layer.weight.grad = torch.tensor([[3.0, 4.0]]).bfloat16()
    masters.collect()
    assert masters.clip(1.0) == pytest.approx(5.0)
    assert masters.masters["weight"].grad.norm().item() == pytest.approx(1.0, rel=1e-5)


def test_without_a_clip_the_norm_is_measured_and_the_gradient_left():
    layer = nn.Linear(2, 1, bias=False).bfloat16()
    masters = MasterWeights(layer, Optim(lr=1.0))
    layer.weight.grad = torch.tensor([[30.0, 40.0]]).bfloat16()
    masters.collect()
    assert masters.clip(None) == pytest.approx(50.0)
    assert masters.masters["weight"].grad.tolist() == [[30.0, 40.0]]


def test_warm_up_is_linear_and_restore_continues_bit_for_bit():
    options = Optim(lr=0.1, lr_warmup_steps=4)
    model = net()
    masters = MasterWeights(model, options)
    rates = []
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(1))
    for update in range(1, 4):
        backward(model, x)
        masters.collect()
        rates.append(masters.step(update))
    assert rates == pytest.approx([0.025, 0.05, 0.075])
    saved = {name: value.clone() for name, value in masters.tensors().items()}
    other_model = net()
    other = MasterWeights(other_model, options)
    other.restore(saved)
    for m, mw in ((model, masters), (other_model, other)):
        backward(m, x)
        mw.collect()
        mw.step(4)
    for name, value in masters.masters.items():
        assert torch.equal(value, other.masters[name])
