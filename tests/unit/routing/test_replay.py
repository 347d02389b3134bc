"""Replay in a mixture-of-experts model of transformers: the recorded experts, weighted by the router that learns."""

import functools

import pytest
import torch
from transformers import Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig

from score_centering.routing.replay import replaying

CONFIG = Qwen3_5MoeTextConfig(
    vocab_size=50,
    hidden_size=32,
    num_hidden_layers=2,
    layer_types=["full_attention", "full_attention"],
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=16,
    moe_intermediate_size=24,
    shared_expert_intermediate_size=24,
    num_experts=8,
    num_experts_per_tok=2,
    initializer_range=0.2,
)
IDS = torch.randint(0, 50, (3, 7), generator=torch.Generator().manual_seed(0))


@functools.cache
def model() -> Qwen3_5MoeForCausalLM:
    torch.manual_seed(0)
    return Qwen3_5MoeForCausalLM(CONFIG)


def forward(net: Qwen3_5MoeForCausalLM) -> tuple[torch.Tensor, list[tuple[torch.Tensor, torch.Tensor]]]:
    """Logits, and what the experts of each layer were given: ids and weights (N, top-k)."""
    given = []
    hooks = [
        layer.mlp.experts.register_forward_pre_hook(lambda module, args: given.append(args[1:]))
        for layer in net.model.layers
    ]
    logits = net(input_ids=IDS, use_cache=False).logits
    for hook in hooks:
        hook.remove()
    return logits, given


def own_routes() -> torch.Tensor:
    _, given = forward(model())
    return torch.stack([ids.view(3, 7, 2) for ids, _ in given], dim=2)


def other_routes() -> torch.Tensor:
    """Two different experts for every token and layer, from a fixed draw."""
    scores = torch.rand(3, 7, 2, 8, generator=torch.Generator().manual_seed(1))
    return scores.topk(2, dim=-1).indices


def test_a_replay_of_its_own_choices_changes_nothing():
    expected, _ = forward(model())
    with replaying(model(), own_routes().to(torch.uint8)):
        logits, _ = forward(model())
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-6)


def test_the_experts_are_the_recorded_ones_and_their_weights_the_routers():
    routes = other_routes()
    with replaying(model(), routes):
        logits, given = forward(model())
    for layer, (ids, weights) in enumerate(given):
        assert torch.equal(ids, routes[:, :, layer].flatten(0, 1))
        torch.testing.assert_close(weights.sum(-1), torch.ones(21))
    assert not torch.equal(logits, forward(model())[0])


def test_the_router_learns_through_the_replay():
    net, routes = model(), other_routes()
    with replaying(net, routes):
        logits, _ = forward(net)
    logits.square().mean().backward()
    for layer in net.model.layers:
        gradient = layer.mlp.gate.weight.grad
        assert gradient.abs().max() > 0
    net.zero_grad()


def test_nothing_stays_behind():
    with pytest.raises(RuntimeError, match="inside"), replaying(model(), other_routes()):
        raise RuntimeError("inside")
    hooks = [layer.mlp.gate._forward_hooks for layer in model().model.layers]
    assert hooks == [{}, {}]
    with replaying(model(), None):
        assert [layer.mlp.gate._forward_hooks for layer in model().model.layers] == [{}, {}]


@pytest.mark.parametrize(
    ("routes", "message"),
    [
        (torch.zeros(3, 7, 1, 2), "routes of 1 layers, the model has 2 routers"),
        (torch.zeros(3, 7, 2, 3), "routes of 3 experts a token, the model takes 2"),
        (torch.full((3, 7, 2, 2), 8), "expert id 8, allowed are 0 … 7"),
    ],
)
def test_routes_of_another_model_are_refused(routes, message):
    with pytest.raises(ValueError, match=message), replaying(model(), routes.to(torch.uint8)):
        pass


def test_a_dense_model_has_nothing_to_replay():
    with (
        pytest.raises(ValueError, match="routes of 2 layers, the model has 0 routers"),
        replaying(torch.nn.Linear(2, 2), other_routes()),
    ):
        pass
