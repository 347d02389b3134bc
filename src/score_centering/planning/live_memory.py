"""Bytes that a forward and backward pass hold at their peak, from a model without storage.

The pass runs on torch's `meta` device, where operations compute shapes only, and every allocation and release is
counted. Two kernels are replaced by what their fused forms keep for the backward pass, since their torch forms hold
far more: attention, and (where asked for) the delta rule of flash-linear-attention.
"""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AttentionInterface
from transformers.models.qwen3_5 import modeling_qwen3_5

FLA_CHUNK = 64  # columns of the in-chunk matrix that flash-linear-attention's delta rule keeps for each position


class _LiveBytes(TorchDispatchMode):
    """Counts storages that operations create, until they are released."""

    def __init__(self, known: list[Tensor]) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._known = weakref.WeakSet(tensor.untyped_storage() for tensor in known)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._count(leaf.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        if storage in self._known:
            return
        self._known.add(storage)
        self.live += storage.nbytes()
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._release, storage.nbytes())

    def _release(self, size: int) -> None:
        self.live -= size


class _FusedAttention(Function):
    """Keeps q, k, v, the output and one log-sum-exp a query and head."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q (B, H, S, D), k, v (B, Hkv, S, D) → (B, S, H, D)."""
        out = q.new_empty(q.shape[0], q.shape[2], q.shape[1], v.shape[3])
        ctx.save_for_backward(q, k, v, out, q.new_empty(q.shape[:3], dtype=torch.float32))
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.empty_like(tensor) for tensor in ctx.saved_tensors[:3])


class _FusedDeltaRule(Function):
    """Keeps q, k, v, g, beta, two norms and the in-chunk matrix; recomputes three tensors of the size of v."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        matrix = q.new_empty(*g.shape, FLA_CHUNK)
        norms = g.new_empty(2, *g.shape)
        ctx.save_for_backward(q, k, v, g, beta, matrix, norms)
        return torch.empty_like(v)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        saved = ctx.saved_tensors
        recomputed = [torch.empty_like(saved[2]) for _ in range(3)]
        gradients = tuple(torch.empty_like(tensor) for tensor in saved[:5])
        del recomputed
        return gradients


def _attention(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **unused: Any) -> tuple[Tensor, None]:
    return _FusedAttention.apply(query, key, value), None


def _delta_rule(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, **unused: Any
) -> tuple[Tensor, None]:
    return _FusedDeltaRule.apply(query, key, value, g, beta), None


AttentionInterface.register("shapes_only", _attention)


@contextmanager
def _fused_delta_rule(fused: bool) -> Iterator[None]:
    original = modeling_qwen3_5.torch_chunk_gated_delta_rule
    if fused:
        modeling_qwen3_5.torch_chunk_gated_delta_rule = _delta_rule
    try:
        yield
    finally:
        modeling_qwen3_5.torch_chunk_gated_delta_rule = original


@contextmanager
def _shapes_only(model: nn.Module) -> Iterator[None]:
    chosen = model.config._attn_implementation
    model.config._attn_implementation = "shapes_only"
    try:
        yield
    finally:
        model.config._attn_implementation = chosen


def _counted(model: nn.Module) -> _LiveBytes:
    return _LiveBytes([*model.parameters(), *model.buffers()])


def _forget_gradient(parameter: Tensor) -> None:
    parameter.grad = None


def forward_bytes(model: nn.Module, rows: int, length: int) -> int:
    """Peak bytes beside the parameters of one forward without gradients, hidden states included; see `pass_bytes`."""
    with torch.no_grad(), _shapes_only(model), _counted(model) as counter:
        ids = torch.empty(rows, length, dtype=torch.int64, device="meta")
        model.get_decoder()(input_ids=ids, use_cache=False)
    return counter.peak


def pass_bytes(model: nn.Module, rows: int, length: int, *, fused_delta_rule: bool, keep_gradients: bool) -> int:
    """Peak bytes beside the parameters of one forward and backward over `rows` sequences of `length` tokens.

    The LM head and the loss are no part of it.

    Args:
        model: transformers' model on the meta device, as it trains (kernels, gradient checkpointing).
        fused_delta_rule: count the delta rule as flash-linear-attention's, not as transformers' torch kernel.
        keep_gradients: the parameters' gradients stay until the end of the pass; otherwise each goes as soon as it is
            there, as a sharded trainer reduces it.
    """
    parameters = list(model.parameters())
    hooks = [] if keep_gradients else [p.register_post_accumulate_grad_hook(_forget_gradient) for p in parameters]
    try:
        with _shapes_only(model), _fused_delta_rule(fused_delta_rule), _counted(model) as counter:
            ids = torch.empty(rows, length, dtype=torch.int64, device="meta")
            hidden = model.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state
            hidden.backward(torch.empty_like(hidden))
    finally:
        model.zero_grad(set_to_none=True)
        for hook in hooks:
            hook.remove()
    return counter.peak
