import pytest
import torch
from torch import nn

from score_centering.precision import listed_linears, quantise_weight, requantise
from score_centering.precision.int8 import FORMAT as INT8


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up_proj, self.gate = nn.Linear(16, 24, bias=False), nn.Linear(16, 2)
        self.norm = nn.LayerNorm(16)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Block(), Block()])
        self.lm_head = nn.Linear(16, 32, bias=False)


def config(ignore, targets=("Linear",)):
    return {"quantization_config": INT8.quantization_config(targets, ignore)}


@pytest.mark.parametrize(
    ("ignore", "targets", "expected"),
    [
        ([], ["Linear"], ["layers.0.up_proj", "layers.0.gate", "layers.1.up_proj", "layers.1.gate", "lm_head"]),
        (["lm_head", "layers.1.gate"], ["Linear"], ["layers.0.up_proj", "layers.0.gate", "layers.1.up_proj"]),
        (["lm_head", "re:.*gate$"], ["Linear"], ["layers.0.up_proj", "layers.1.up_proj"]),
        (["re:gate"], ["lm_head", "re:layers.0.*"], ["layers.0.up_proj", "layers.0.gate", "lm_head"]),
    ],
)
def test_listed_linears(ignore, targets, expected):
    assert listed_linears(config(ignore, targets), Model()) == dict.fromkeys(expected, INT8)


def weights():
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(tensor.shape, generator=generator).to(torch.bfloat16)
        for name, tensor in Model().state_dict().items()
    }


def test_only_the_listed_layers_change():
    before = weights()
    after = requantise(before, dict.fromkeys(["layers.0.up_proj", "layers.1.gate"], INT8))
    codes, scale = quantise_weight(before["layers.0.up_proj.weight"])
    assert torch.equal(after["layers.0.up_proj.weight"], codes)
    assert torch.equal(after["layers.0.up_proj.weight_scale"], scale)
    assert after["layers.1.gate.weight"].dtype == torch.int8
    untouched = before.keys() - {"layers.0.up_proj.weight", "layers.1.gate.weight"}
    assert all(after[name] is before[name] for name in untouched)
    assert after.keys() == before.keys() | {"layers.0.up_proj.weight_scale", "layers.1.gate.weight_scale"}


def test_missing_layer_is_named():
    with pytest.raises(ValueError, match=r"no weight 'layers\.7\.up_proj\.weight'"):
        requantise(weights(), dict.fromkeys(["layers.0.up_proj", "layers.7.up_proj"], INT8))


def test_other_dtype_is_named():
    before = weights()
    before["lm_head.weight"] = before["lm_head.weight"].float()
    with pytest.raises(ValueError, match=r"lm_head\.weight is torch\.float32 \(32, 16\), must be a bfloat16 matrix"):
        requantise(before, dict.fromkeys(["lm_head"], INT8))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_non_finite_weight_is_named(value):
    before = weights()
    before["layers.1.up_proj.weight"][3, 5] = value
    with pytest.raises(ValueError, match=r"layers\.1\.up_proj\.weight holds a NaN or an infinite value"):
        requantise(before, dict.fromkeys(["layers.0.up_proj", "layers.1.up_proj"], INT8))


def test_nothing_listed_is_a_copy_of_the_mapping():
    before = weights()
    after = requantise(before, {})
    assert after == before and after is not before
