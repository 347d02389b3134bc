"""The forward pass of C new tokens of B rows against their state: prefill (C > 1) and decoding (C = 1).

It rounds where transformers' BF16 model rounds, except in the three places where the production engine's fused kernels
keep FP32: inside the convolution, the delta rule and attention. Rows never mix, and shapes depend on the engine alone.

Axis letters: B rows, C tokens, N = B·C, D head size, S cache positions, H query heads, G query heads of a KV head.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from score_centering.precision import int4_kv
from score_centering.precision.bf16 import delta_chunk, l2norm
from score_centering.precision.kv_caches import CacheFormat, cache_of
from score_centering.rollout.local.architecture import Architecture, Experts
from score_centering.rollout.local.cache_faults import CacheFaults
from score_centering.rollout.local.engine_weights import (
    AttentionWeights,
    ExpertWeights,
    LinearAttentionWeights,
    MlpWeights,
    Weights,
)
from score_centering.rollout.local.state import AttentionState, LinearAttentionState, State


@dataclass(frozen=True)
class Step:
    """Where the new tokens stand.

    Args:
        rows: (B,) int64 0 … B − 1.
        positions: (B, C) int64 position of each token in its sequence.
        valid: (B, C) bool; a token that is not valid leaves no trace. None when all are.
        hidden: (B, 1, C, S) bool; the cache positions a token does not attend to.
        cos, sin: (B, C, 1, rotary dims) bfloat16, or (C, 1, rotary dims) while prompts are read.
        owner: (B,) int64, what the rows belong to; read by `faults` only.
        faults: damages what is written into the INT4 cache; None but in a study of faults.
        routes: (B, C, layers, top-k), takes the expert choices; None when nobody asks for them.
    """

    rows: Tensor
    positions: Tensor
    valid: Tensor | None
    hidden: Tensor
    cos: Tensor
    sin: Tensor
    owner: Tensor | None = None
    faults: CacheFaults | None = None
    routes: Tensor | None = None


def hidden_states(architecture: Architecture, weights: Weights, state: State, tokens: Tensor, step: Step) -> Tensor:
    """tokens (B, C) int64 → last hidden states (N, hidden) bfloat16 after the final norm; updates `state`."""
    x = F.embedding(tokens.flatten(), weights.embedding).to(torch.bfloat16)
    for index, (layer, memory) in enumerate(zip(weights.layers, state.layers, strict=True)):
        h = rms_norm(x, layer.norm_in, architecture.norm_eps)
        if isinstance(memory, AttentionState):
            mixed = _attention(architecture, layer.mixer, memory, h, step, index)
        else:
            mixed = _linear_attention(architecture, layer.mixer, memory, h, step)
        x = x + mixed
        h = rms_norm(x, layer.norm_mid, architecture.norm_eps)
        if isinstance(layer.mlp, MlpWeights):
            x = x + _mlp(layer.mlp, h)
        else:
            mixed, chosen = _experts(layer.mlp, architecture.experts, h)
            x = x + mixed
            if step.routes is not None:
                step.routes[:, :, index] = chosen.view(*step.positions.shape, -1)
    return rms_norm(x, weights.norm_out, architecture.norm_eps)


def _mlp(weights: MlpWeights, h: Tensor) -> Tensor:
    gate, up = weights.gate_up(h).chunk(2, dim=-1)
    return weights.down(F.silu(gate) * up)


def _experts(weights: ExpertWeights, experts: Experts, h: Tensor) -> tuple[Tensor, Tensor]:
    """The mixture of h (N, hidden) → (N, hidden) bfloat16, and the experts chosen (N, top-k) int64.

    Every expert computes every token, so that shapes never depend on the choices and rows don't mix.
    """
    probabilities = torch.softmax(weights.router(h), dim=-1, dtype=torch.float32)
    share, chosen = probabilities.topk(experts.top_k, dim=-1)
    share = (share / share.sum(dim=-1, keepdim=True)).to(torch.bfloat16)
    share = torch.zeros_like(probabilities, dtype=torch.bfloat16).scatter_(1, chosen, share)  # (N, E)
    gate, up = weights.gate_up(h).view(h.shape[0], experts.count, 2, -1).unbind(2)  # (N, E, I)
    inner = (F.silu(gate) * up).transpose(0, 1).to(weights.down.dtype)
    out = (inner @ weights.down.transpose(1, 2)).to(torch.bfloat16)  # (E, N, hidden)
    routed = (out * share.t().unsqueeze(-1)).sum(dim=0, dtype=torch.float32).to(torch.bfloat16)
    return routed + torch.sigmoid(weights.shared_gate(h)) * _mlp(weights.shared, h), chosen


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm of x (…, D) bfloat16 in FP32, times weight (…, D): BF16 after the rounding (Llama), FP32 before."""
    if weight.dtype == torch.float32:
        return F.rms_norm(x.float(), x.shape[-1:], None, eps).mul_(weight).to(x.dtype)
    return F.rms_norm(x.float(), x.shape[-1:], None, eps).to(x.dtype) * weight


def _attention(
    architecture: Architecture, weights: AttentionWeights, state: AttentionState, h: Tensor, step: Step, layer: int
) -> Tensor:
    heads, kv_heads, size = architecture.heads, architecture.kv_heads, architecture.head_size
    batch, length = step.positions.shape
    gated = architecture.family.output_gate
    query_features = heads * size * (2 if gated else 1)
    query, key, value = weights.qkv(h).split([query_features, kv_heads * size, kv_heads * size], dim=-1)
    if gated:
        query, gate = query.view(-1, heads, 2 * size).chunk(2, dim=-1)
    query_key = torch.cat([query.reshape(-1, heads, size), key.reshape(-1, kv_heads, size)], dim=1)
    if weights.qk_norm is not None:
        query_key = rms_norm(query_key, weights.qk_norm, architecture.norm_eps)
    query_key = rotate_positions(query_key.view(batch, length, heads + kv_heads, size), step.cos, step.sin)
    new = torch.cat([query_key, value.reshape(batch, length, kv_heads, size)], dim=2).transpose(1, 2)
    out = attend(new, heads, state.kv, step, layer)  # (B, H, C, D)
    out = out.transpose(1, 2).reshape(-1, heads * size)
    if gated:
        out = out * torch.sigmoid(gate.reshape(-1, heads * size))
    return weights.out(out)


def rotate_positions(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of the first R dims of x (B, C, heads, D) by cos, sin (…, C, 1, R), in BF16 as transformers."""
    rotated, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    first, second = rotated.chunk(2, dim=-1)
    rotated = rotated * cos + torch.cat([-second, first], dim=-1) * sin
    return torch.cat([rotated, rest], dim=-1) if rest.shape[-1] else rotated


def attend(new: Tensor, heads: int, kv: Tensor, step: Step, layer: int = 0) -> Tensor:
    """Writes new keys and values into the cache, then attends to it: also prefill reads what the cache holds.

    Args:
        new: (B, H + 2·Hkv, C, D) bfloat16, queries, keys, values.
        kv: (B, 2·Hkv, S, ·) cache; its dtype tells the format (`precision.kv_caches`).
        layer: the layer's number, which tells `step.faults` the layers apart.

    Returns:
        (B, H, C, D) bfloat16.
    """
    cache = cache_of(kv)
    size = new.shape[-1]
    query, key_value = new[:, :heads], new[:, heads:]
    write = cache.encode(key_value)
    if step.faults is not None:
        write = step.faults.damage(write, step.owner, step.positions, layer)
    kv[step.rows[:, None], :, step.positions] = write.transpose(1, 2)
    query = query.reshape(query.shape[0], kv.shape[1] // 2, -1, size)  # (B, Hkv, G·C, D)
    if cache.rotated:
        out = int4_kv.unrotate(_attend_packed(int4_kv.rotate(query), kv, size**-0.5 / size, step))
    else:
        out = _attend_bf16(cache, query, kv, size**-0.5, step.hidden)
    return out.view(out.shape[0], heads, -1, size)


def _attend_bf16(cache: CacheFormat, query: Tensor, kv: Tensor, scale: float, hidden: Tensor) -> Tensor:
    """query (B, Hkv, G·C, D) bfloat16, kv (B, 2·Hkv, S, ·) → (B, Hkv, G·C, D) bfloat16; softmax in FP32.

    A scale of the entries enters scores and probabilities, as in vLLM 0.25.0's `kernel_unified_attention`.
    """
    numbers, scales = cache.read(kv)
    key, value = numbers.chunk(2, dim=1)
    scores = _product(cache.narrow(query), key.transpose(-1, -2))
    if scales is None:
        weight, total = _exponentials(scores * scale, hidden)
    else:
        key_scale, value_scale = scales.unsqueeze(-2).chunk(2, dim=1)  # (B, Hkv, 1, S)
        weight, total = _exponentials(scores * (scale * key_scale), hidden)
        weight = weight * value_scale
    return (_product(cache.narrow(weight), value) / total).to(torch.bfloat16)


def _attend_packed(query: Tensor, kv: Tensor, scale: float, step: Step) -> Tensor:
    """The arithmetic of vLLM 0.25.0's `unified_attention_int4` in the rotated space.

    The products run on the integer codes, even and odd dims apart; scales and zero points enter scores and sums.
    The packed bytes are read whole, so the scale's bytes take part as four more dims of weight 0.
    query (B, Hkv, G·C, D) bfloat16, rotated; kv (B, 2·Hkv, S, D/2 + 4) uint8 → (B, Hkv, G·C, D) bfloat16, rotated.
    """
    if query.is_cuda and step.positions.shape[1] == 1:
        from score_centering.rollout.local import attention_kernels

        return attention_kernels.attend_packed(query, kv, scale, step.positions)
    half = query.shape[-1] // 2
    kv_scale, kv_zero = int4_kv.unpack_scale(kv)
    key_scale, value_scale = kv_scale.unsqueeze(-2).chunk(2, dim=1)  # (B, Hkv, 1, S)
    key_zero, value_zero = kv_zero.unsqueeze(-2).chunk(2, dim=1)
    codes = torch.empty(2, *kv.shape, dtype=torch.uint8, device=kv.device)
    torch.bitwise_and(kv, 0xF, out=codes[0])
    torch.bitwise_right_shift(kv, 4, out=codes[1])
    key_codes, value_codes = codes.float().chunk(2, dim=2)  # (2, B, Hkv, S, D/2 + 4)
    query = query.float()
    streams = F.pad(
        query.unflatten(-1, (half, 2)).movedim(-1, 0), (0, kv.shape[-1] - half)
    )  # (2, B, Hkv, G·C, D/2 + 4)
    raw = (streams @ key_codes.transpose(-1, -2)).sum(dim=0)
    scores = (raw - query.sum(dim=-1, keepdim=True) * key_zero) * (key_scale * scale)
    weight, total = _exponentials(scores, step.hidden)
    weight = weight * value_scale
    sums = (weight @ value_codes)[..., :half] - (weight * value_zero).sum(dim=-1, keepdim=True)
    return (sums / total).movedim(0, -1).flatten(-2).to(torch.bfloat16)


def _exponentials(scores: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Softmax over the visible positions of scores (B, Hkv, G·C, S), as numerators and their sum (…, 1), FP32."""
    scores.view(scores.shape[0], -1, *hidden.shape[-2:]).masked_fill_(hidden, -torch.inf)
    weight = (scores - scores.amax(dim=-1, keepdim=True)).exp_()
    return weight, weight.sum(dim=-1, keepdim=True)


def _product(a: Tensor, b: Tensor) -> Tensor:
    """a (…, M, K) · b (…, K, N), both bfloat16, accumulated and returned in FP32."""
    if a.is_cuda:
        return torch.bmm(a.flatten(0, 1), b.flatten(0, 1), out_dtype=torch.float32).unflatten(0, a.shape[:2])
    return a.float() @ b.float()


def _linear_attention(
    architecture: Architecture, weights: LinearAttentionWeights, state: LinearAttentionState, h: Tensor, step: Step
) -> Tensor:
    sizes = architecture.linear
    batch, length = step.positions.shape
    mixed, gate = weights.qkvz(h).split([sizes.conv_features, sizes.value_features], dim=-1)
    beta, decay = weights.beta_decay(h).view(batch, length, 2, -1).unbind(2)  # (B, C, Hv)
    beta = beta.sigmoid().float()
    decay = weights.decay_rate * F.softplus(decay.float() + weights.decay_bias)
    if step.valid is not None:  # neither writes nor decays the recurrent state
        beta, decay = beta * step.valid[..., None], decay * step.valid[..., None]
    mixed = convolve(mixed.view(batch, length, -1), weights.conv, state.conv, step.valid).float()
    query_key = mixed[..., : 2 * sizes.key_features].view(batch, length, 2, sizes.key_heads, -1)
    value = mixed[..., 2 * sizes.key_features :].view(batch, length, sizes.value_heads, -1)
    rule = delta_step if length == 1 else delta_prefill
    out = rule(l2norm(query_key), value, decay, beta, state.recurrent).to(torch.bfloat16)
    out = rms_norm(out, weights.norm, architecture.norm_eps)
    out = out.flatten(2) * F.silu(gate.view(batch, length, -1).float())
    return weights.out(out.view(batch * length, -1).to(torch.bfloat16))


def convolve(x: Tensor, weight: Tensor, state: Tensor, valid: Tensor | None) -> Tensor:
    """SiLU of the causal depthwise convolution, in FP32; keeps the last W − 1 valid inputs.

    x (B, C, F) bfloat16, weight (W, F) float32, state (B, W − 1, F) bfloat16, updated in place, valid (B, C) bool →
    (B, C, F) bfloat16.
    """
    width, length = weight.shape[0], x.shape[1]
    window = torch.cat([state, x], dim=1)
    window32 = window.float()
    if length == 1:
        total = (window32 * weight).sum(dim=1, keepdim=True)
    else:
        total = sum(window32[:, tap : tap + length] * weight[tap] for tap in range(width))
    if valid is None:
        state.copy_(window[:, length:])
    else:
        last = valid.sum(dim=1, keepdim=True) + torch.arange(width - 1, device=x.device)
        state.copy_(window.gather(1, last.unsqueeze(-1).expand(-1, -1, x.shape[-1])))
    return F.silu(total).to(x.dtype)


def delta_step(query_key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, state: Tensor) -> Tensor:
    """One step of the gated delta rule: S ← e^g S + k ⊗ β(v − kᵀ e^g S), output qᵀ S / √Dk, with one read of S.

    Each key head serves Hv / Hk value heads.

    Args:
        query_key: (B, 1, 2, Hk, Dk) float32, normalised.
        value: (B, 1, Hv, Dv) float32.
        decay, beta: (B, 1, Hv) float32, log of the decay and write strength.
        state: (B, Hv, Dk, Dv) bfloat16 or float32, updated in place. The output uses the new state before its rounding.

    Returns:
        (B, 1, Hv, Dv) float32.
    """
    batch, heads, key_size, _ = state.shape
    memory = state.float()
    rate = decay.exp().view(batch, heads, 1, 1)
    rows = query_key.squeeze(1).transpose(1, 2).unsqueeze(2)  # (B, Hk, 1, 2, Dk)
    rows = rows.expand(-1, -1, heads // rows.shape[1], -1, -1).reshape(batch, heads, 2, key_size)
    query, key = rows.split(1, dim=2)
    read, recalled = ((rows @ memory) * rate).split(1, dim=2)
    delta = (value.transpose(1, 2) - recalled) * beta.view(batch, heads, 1, 1)
    state.copy_(memory.mul_(rate).addcmul_(key.transpose(-1, -2), delta))
    out = torch.addcmul(read, (query * key).sum(dim=-1, keepdim=True), delta)
    return out.mul_(key_size**-0.5).transpose(1, 2)


def delta_prefill(query_key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, state: Tensor) -> Tensor:
    """The gated delta rule over C tokens as one chunk; see `delta_step`.

    Args:
        query_key: (B, C, 2, Hk, Dk) float32, normalised.
        value: (B, C, Hv, Dv) float32.
        decay, beta: (B, C, Hv) float32.
        state: (B, Hv, Dk, Dv) bfloat16 or float32, updated in place.

    Returns:
        (B, C, Hv, Dv) float32.
    """
    query, key = query_key.repeat_interleave(state.shape[1] // query_key.shape[3], dim=3).unbind(2)
    parts = [x.transpose(1, 2) for x in (query * key.shape[-1] ** -0.5, key, value, decay, beta)]
    out, new_state = delta_chunk(*parts, state.float())
    state.copy_(new_state)
    return out.transpose(1, 2)
