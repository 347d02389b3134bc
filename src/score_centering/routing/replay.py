"""The training forward through the experts that the sampler chose."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle


@contextmanager
def replaying(model: nn.Module, routes: Tensor | None) -> Iterator[None]:
    """Inside the block every router of `model` takes the recorded experts, weighted by its own probabilities of them.

    The router still learns: the gradient reaches it through those weights. Without routes the model is left alone.

    Args:
        routes: (B, S, layers, top-k), the expert ids of every position of the next forwards.

    Raises:
        ValueError: routes of another number of layers, top-k or experts than the model's.
    """
    handles: list[RemovableHandle] = []
    if routes is not None:
        from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeTopKRouter

        routers = [module for module in model.modules() if isinstance(module, Qwen3_5MoeTopKRouter)]
        _check(routers, routes)
        handles = [
            router.register_forward_hook(_chooser(routes[:, :, layer].flatten(0, 1).long()))
            for layer, router in enumerate(routers)
        ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _chooser(chosen: Tensor):
    """The forward hook that puts `chosen` (N, top-k) in the place of a router's own choice."""

    def choose(
        router: nn.Module, inputs: tuple, output: tuple[Tensor, Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        logits = output[0]  # (N, experts)
        weights = torch.softmax(logits, dim=-1, dtype=torch.float32).gather(-1, chosen)
        return logits, (weights / weights.sum(dim=-1, keepdim=True)).to(logits.dtype), chosen

    return choose


def _check(routers: list[nn.Module], routes: Tensor) -> None:
    if len(routers) != routes.shape[2]:
        raise ValueError(f"routing replay: routes of {routes.shape[2]} layers, the model has {len(routers)} routers")
    top_k, experts = routers[0].top_k, routers[0].num_experts
    if routes.shape[3] != top_k:
        raise ValueError(f"routing replay: routes of {routes.shape[3]} experts a token, the model takes {top_k}")
    if int(routes.max()) >= experts:
        raise ValueError(f"routing replay: expert id {int(routes.max())}, allowed are 0 … {experts - 1}")
