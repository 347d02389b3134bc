"""BF16 arithmetic on CPUs that have no BF16 units: the same numbers as a tensor core gives, at FP32 speed.

A tensor core multiplies BF16 operands, accumulates in FP32 and rounds the result to BF16. The functions here do that
with FP32 matrix products on BF16 operands; native BF16 products are 10 to 40 times slower on such a CPU. Softmax
attention, the depthwise convolution and the delta rule of Qwen3.5's gated linear attention run in FP32 inside and round
at their end, as the fused CUDA kernels do.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return (x.float() @ weight.float().t()).to(x.dtype)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        grad32 = grad.float()
        grad_x = (grad32 @ weight.float()).to(x.dtype)
        grad_weight = (grad32.flatten(0, -2).t() @ x.float().flatten(0, -2)).to(weight.dtype)
        return grad_x, grad_weight


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """`x (…, I) · weight (O, I)ᵀ` with FP32 accumulation, rounded to the dtype of `x`; differentiable in both."""
    return _Linear.apply(x, weight)


def attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """transformers' `sdpa` attention in FP32, rounded once.

    query (B, H, S, D), key, value (B, Hkv, S, D), attention_mask (B, 1, S, S) bool or None for a causal one →
    (B, S, H, D) in the dtype of `query`.
    """
    out, weights = sdpa_attention_forward(module, query.float(), key.float(), value.float(), attention_mask, **kwargs)
    return out.to(query.dtype), weights


class _Convolution(torch.autograd.Function):
    """Tap W − 1 − n of `weight` meets the input n positions back; n < S, so a short sequence has fewer taps."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor) -> Tensor:
        taps, x32, length = weight.float().t().contiguous(), x.float(), x.shape[1]
        total = x32 * taps[-1]
        for back in range(1, min(len(taps), length)):
            total[:, back:].addcmul_(x32[:, : length - back], taps[-1 - back])
        ctx.save_for_backward(x, weight, total)
        return F.silu(total).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight, total = ctx.saved_tensors
        taps, x32, length = weight.float().t().contiguous(), x.float(), x.shape[1]
        grad32 = torch.ops.aten.silu_backward(grad.float(), total)
        grad_x, grad_taps = grad32 * taps[-1], torch.zeros_like(taps)
        grad_taps[-1] = (x32 * grad32).sum((0, 1))
        for back in range(1, min(len(taps), length)):
            grad_x[:, : length - back].addcmul_(grad32[:, back:], taps[-1 - back])
            grad_taps[-1 - back] = (x32[:, : length - back] * grad32[:, back:]).sum((0, 1))
        return grad_x.to(x.dtype), grad_taps.t().to(weight.dtype)


def causal_depthwise_conv(x: Tensor, weight: Tensor) -> Tensor:
    """SiLU of the causal depthwise convolution of `x (B, S, C)` with `weight (C, W)`; differentiable in both."""
    return _Convolution.apply(x, weight)


def gated_delta_rule(query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, chunk: int = 64) -> Tensor:
    """Chunked gated delta rule from a zero state (Gated Delta Networks, arXiv 2412.06464, Section 3.3).

    The in-chunk recurrence is one unit triangular solve, and a sequence shorter than `chunk` is not padded to it.

    Args:
        query, key: (B, S, H, Dk), not normalised yet.
        value: (B, S, H, Dv).
        g: (B, S, H) float32, log of the decay.
        beta: (B, S, H), write strength.

    Returns:
        (B, S, H, Dv) in the dtype of `query`; FP32 inside.
    """
    dtype, length = query.dtype, query.shape[1]
    query, key, value, g, beta = (x.transpose(1, 2).float() for x in (query, key, value, g, beta))
    query, key = l2norm(query) * query.shape[-1] ** -0.5, l2norm(key)
    chunk = min(chunk, length)
    state = query.new_zeros(*query.shape[:2], key.shape[-1], value.shape[-1])
    outputs = []
    for start in range(0, length, chunk):
        part = slice(start, min(start + chunk, length))
        out, state = delta_chunk(
            query[:, :, part], key[:, :, part], value[:, :, part], g[:, :, part], beta[:, :, part], state
        )
        outputs.append(out)
    return torch.cat(outputs, dim=2).transpose(1, 2).to(dtype)


def delta_chunk(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """One chunk: q, k (B, H, C, Dk), v (B, H, C, Dv), g, beta (B, H, C), state (B, H, Dk, Dv) → output, new state."""
    size = q.shape[2]
    decay = g.cumsum(dim=-1)
    lower = torch.ones(size, size, dtype=torch.bool, device=q.device).tril()
    ratio = torch.where(lower, decay.unsqueeze(-1) - decay.unsqueeze(-2), -torch.inf).exp()
    k_beta = k * beta.unsqueeze(-1)
    system = (k_beta @ k.transpose(-1, -2)) * ratio  # the solve reads its strictly lower part only
    target = v * beta.unsqueeze(-1) - (k_beta * decay.exp().unsqueeze(-1)) @ state
    written = torch.linalg.solve_triangular(system, target, upper=False, unitriangular=True)
    out = (q * decay.exp().unsqueeze(-1)) @ state + ((q @ k.transpose(-1, -2)) * ratio) @ written
    last = decay[..., -1:]
    state = state * last.exp().unsqueeze(-1) + (k * (last - decay).exp().unsqueeze(-1)).transpose(-1, -2) @ written
    return out, state


def l2norm(x: Tensor, eps: float = 1e-6) -> Tensor:
    """x (..., D) over its Euclidean norm along D."""
    return x * torch.rsqrt((x * x).sum(dim=-1, keepdim=True) + eps)


class _CpuLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight) if self.bias is None else linear(x, self.weight) + self.bias


# transformers writes the mixture's class as a copy of the dense model's; named here so that nobody imports both
DELTA_NETS = ("Qwen3_5GatedDeltaNet", "Qwen3_5MoeGatedDeltaNet")
ATTENTION = "sdpa_in_fp32"  # torch's backward of BF16 attention takes ten times as long on a CPU
AttentionInterface.register(ATTENTION, attend)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)


class _CpuGatedDeltaNet(Qwen3_5GatedDeltaNet):
    def forward(self, hidden_states: Tensor, **kwargs) -> Tensor:
        """`hidden_states` (B, S, D) of whole sequences from position 0 on, padded on the right if at all.

        Sequences packed into one row come with their offsets, `cu_seq_lens_q` (N + 1,).
        """
        if kwargs.get("cache_params") is not None:
            raise ValueError("the CPU training path of gated linear attention takes whole sequences, no cache")
        offsets = kwargs.get("cu_seq_lens_q")
        if offsets is not None:
            parts = hidden_states.split(offsets.diff().tolist(), dim=1)
            return torch.cat([self.forward(part) for part in parts], dim=1)
        batch, length, _ = hidden_states.shape
        mixed = causal_depthwise_conv(self.in_proj_qkv(hidden_states), self.conv1d.weight.squeeze(1))
        query, key, value = mixed.split([self.key_dim, self.key_dim, self.value_dim], dim=-1)
        query = query.reshape(batch, length, self.num_k_heads, self.head_k_dim)
        key = key.reshape(batch, length, self.num_k_heads, self.head_k_dim)
        value = value.reshape(batch, length, self.num_v_heads, self.head_v_dim)
        groups = self.num_v_heads // self.num_k_heads
        query, key = query.repeat_interleave(groups, dim=2), key.repeat_interleave(groups, dim=2)
        beta = self.in_proj_b(hidden_states).sigmoid()
        g = -self.A_log.float().exp() * F.softplus(self.in_proj_a(hidden_states).float() + self.dt_bias)
        out = gated_delta_rule(query, key, value, g, beta)
        gate = self.in_proj_z(hidden_states).reshape(-1, self.head_v_dim)
        return self.out_proj(self.norm(out.reshape(-1, self.head_v_dim), gate).reshape(batch, length, -1))


def install_cpu_kernels(model: PreTrainedModel) -> None:
    """Let every linear and attention layer of `model` (in place) compute through this module.

    Whole sequences only: a model that must decode with a cache keeps transformers' own layers (or the local engine's).
    """
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = _CpuLinear
        elif type(module).__name__ in DELTA_NETS:
            module.__class__ = _CpuGatedDeltaNet
    model.set_attn_implementation(ATTENTION)
