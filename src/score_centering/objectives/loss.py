"""The policy loss of a microbatch from hidden states or from logits: two entries, one chunk core.

Tokens are taken in chunks. Each chunk's logits are formed, reduced to per-token terms and turned into their gradient in
the same pass, inside one autograd function, so no (T, V) tensor is held beyond what the caller passes, but for the
bfloat16 gradients of a short batch on a GPU (`one_weight_product`). Softmax arithmetic is float32 (float64 for float64
inputs). Products of bfloat16 tensors accumulate in float32 and logits are not rounded to bfloat16; on the CPU, where
bfloat16 products are slow, they are float32 products of the same bfloat16 values.
"""

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from score_centering.objectives.batch import TokenBatch, check_shapes
from score_centering.objectives.metrics import token_sums
from score_centering.objectives.objective import Objective
from score_centering.objectives.terms import TokenTerms, harmless_rows, token_terms

DTYPES = (torch.bfloat16, torch.float32, torch.float64)
Piece = tuple[int, int]
CHUNK_BYTES = {"cpu": 32 << 20, "cuda": 1600 << 20}


@dataclass(frozen=True)
class LossResult:
    """loss: scalar Σ w·ℓ with gradient. logprobs: (T,) log p_y, detached, 0 in masked rows.

    terms: per-token results, detached; masked rows are 0. sums: float64 scalars for `add_sums` and `finalise_metrics`.
    """

    loss: Tensor
    logprobs: Tensor
    terms: TokenTerms
    sums: dict[str, Tensor]


def policy_loss_from_hidden(
    hidden: Tensor,
    lm_head_weight: Tensor,
    batch: TokenBatch,
    objective: Objective,
    temperature: float = 1.0,
    chunk_size: int | None = None,
) -> LossResult:
    """loss = Σ_t w_t·ℓ_t of p = softmax(hidden·lm_head_weightᵀ / temperature), with the gradients of both inputs.

    Args:
        hidden: (T, D) bfloat16, float32 or float64; row t predicts target_ids[t].
        lm_head_weight: (V, D) of hidden's dtype, or float32 beside bfloat16 hidden states: products then use its
            bfloat16 values, its gradient stays float32.
        batch: the T tokens.
        temperature: the sampling temperature.
        chunk_size: tokens a chunk; None picks one that keeps the chunk's buffers within CHUNK_BYTES.
    """
    if hidden.dim() != 2 or lm_head_weight.dim() != 2 or hidden.shape[1] != lm_head_weight.shape[1]:
        raise ValueError(
            f"policy loss: hidden {tuple(hidden.shape)} and lm_head_weight {tuple(lm_head_weight.shape)} must be "
            "(T, D) and (V, D)"
        )
    if lm_head_weight.dtype not in (hidden.dtype, torch.float32) or (
        hidden.dtype == torch.float64 and lm_head_weight.dtype != torch.float64
    ):
        raise ValueError(
            f"policy loss: hidden is {hidden.dtype} and lm_head_weight {lm_head_weight.dtype}; "
            "allowed are one dtype for both, or a float32 weight with bfloat16 hidden states"
        )
    rows, pieces = _prepare(hidden, lm_head_weight.shape[0], batch, objective, temperature, chunk_size)
    needs_gradient = torch.is_grad_enabled() and (hidden.requires_grad or lm_head_weight.requires_grad)
    loss, *terms = _LossFromHidden.apply(hidden, lm_head_weight, rows, objective, temperature, pieces, needs_gradient)
    return _result(loss, terms, objective, batch)


def policy_loss_from_logits(
    logits: Tensor, batch: TokenBatch, objective: Objective, temperature: float = 1.0, chunk_size: int | None = None
) -> LossResult:
    """The same loss from logits (T, V) that are not yet divided by the temperature; their gradient has their dtype."""
    if logits.dim() != 2:
        raise ValueError(f"policy loss: logits {tuple(logits.shape)} must be (T, V)")
    rows, pieces = _prepare(logits, logits.shape[1], batch, objective, temperature, chunk_size)
    needs_gradient = torch.is_grad_enabled() and logits.requires_grad
    loss, *terms = _LossFromLogits.apply(logits, rows, objective, temperature, pieces, needs_gradient)
    return _result(loss, terms, objective, batch)


def _prepare(
    inputs: Tensor, vocab_size: int, batch: TokenBatch, objective: Objective, temperature: float, chunk_size: int | None
) -> tuple[TokenBatch, list[Piece]]:
    if inputs.dtype not in DTYPES:
        raise ValueError(f"policy loss: {inputs.dtype} is not one of {', '.join(str(dtype) for dtype in DTYPES)}")
    if not 0 < temperature < float("inf"):
        raise ValueError(f"policy loss: temperature {temperature} must be positive and finite")
    if chunk_size is not None and chunk_size < 1:
        raise ValueError(f"policy loss: chunk_size {chunk_size} must be at least 1")
    check_shapes(batch, inputs.shape[0], vocab_size, objective.needs_candidates, objective.weighs_rollouts)
    rows = harmless_rows(batch, _arithmetic(inputs.dtype), objective.needs_candidates)
    return rows, _pieces(rows, objective, chunk_size or _default_chunk_size(vocab_size, inputs.device.type))


def _pieces(rows: TokenBatch, objective: Objective, chunk_size: int) -> list[Piece]:
    """Chunks of at most `chunk_size` rows; of whole rollouts, however long one is, where a weight needs them."""
    if not objective.weighs_rollouts:
        return [(start, min(start + chunk_size, rows.tokens)) for start in range(0, rows.tokens, chunk_size)]
    pieces, start, stop = [], 0, 0
    for length in rows.sequence_ids.unique_consecutive(return_counts=True)[1].tolist():
        if stop > start and stop + length - start > chunk_size:
            pieces.append((start, stop))
            start = stop
        stop += length
    return [*pieces, (start, stop)] if stop > start else pieces


def _arithmetic(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _default_chunk_size(vocab_size: int, device_type: str) -> int:
    """As many rows as the budget allows, a row being float32 logits and a bfloat16 gradient.

    A large chunk is a multiple of 1024 rows, so that the products fill whole waves of thread blocks.
    """
    most = max(1, CHUNK_BYTES[device_type] // (6 * vocab_size))
    return most // 1024 * 1024 if most >= 1024 else most


def _result(loss: Tensor, terms: list[Tensor], objective: Objective, batch: TokenBatch) -> LossResult:
    per_token = TokenTerms(**dict(zip(_term_names(objective), terms, strict=True)))
    return LossResult(loss, per_token.log_p, per_token, token_sums(per_token, batch))


def _term_names(objective: Objective) -> tuple[str, ...]:
    always = ("loss", "log_p", "entropy")
    weight = () if objective.clips else ("weight",)
    clipped = ("clipped",) if objective.clips or objective.weight.clips else ()
    head = ("head_mass_sampler", "head_mass_trainer", "correction_abs") if objective.centering else ()
    return (*always, *weight, *clipped, *head)


def _slice(rows: TokenBatch, start: int, stop: int) -> TokenBatch:
    columns = {field.name: getattr(rows, field.name) for field in fields(rows)}
    return replace(rows, **{name: None if column is None else column[start:stop] for name, column in columns.items()})


def _uses_triton(values: Tensor) -> bool:
    return values.is_cuda and values.dtype != torch.float64


class _Core:
    """One pass over the chunks: per-token terms, and the gradient of Σ w·ℓ with respect to each chunk's logits."""

    def __init__(self, rows: TokenBatch, objective: Objective, temperature: float):
        self.rows, self.objective, self.temperature = rows, objective, temperature
        self.terms = {name: torch.zeros_like(rows.advantages) for name in _term_names(objective)}
        self.row_statistics, self.softmax_times = row_statistics, softmax_times
        if _uses_triton(rows.advantages):
            from score_centering.objectives import triton_kernels

            self.row_statistics, self.softmax_times = triton_kernels.row_statistics, triton_kernels.softmax_times

    def chunk(self, logits: Tensor, start: int, stop: int, gradient: Tensor | None) -> None:
        """Reduce logits (C, V) of the rows [start, stop); write dΣwℓ/dlogits into `gradient` (C, V) unless it is None.

        `gradient` may be `logits` itself.
        """
        rows = _slice(self.rows, start, stop)
        normaliser, entropy = self.row_statistics(logits, self.temperature)
        log_p = logits.gather(1, rows.target_ids[:, None]).squeeze(1) / self.temperature - normaliser
        head_log_p = None
        if self.objective.centering:
            head_log_p = logits.gather(1, rows.candidate_ids) / self.temperature - normaliser[:, None]
        terms, part = token_terms(log_p, entropy, head_log_p, rows, self.objective)
        for name, stored in self.terms.items():
            torch.mul(getattr(terms, name), rows.mask, out=stored[start:stop])
        if gradient is not None:
            scale = rows.loss_weights / self.temperature
            values = (scale[:, None] * part.values).to(gradient.dtype)
            self.softmax_times(logits, normaliser, scale * part.dense, self.temperature, gradient)
            gradient.scatter_(1, part.ids[:, :1], values[:, :1])
            gradient.scatter_(1, part.ids[:, 1:], values[:, 1:])

    def outputs(self) -> tuple[Tensor, ...]:
        loss = (self.rows.loss_weights.double() * self.terms["loss"].double()).sum().to(self.rows.advantages.dtype)
        return (loss, *self.terms.values())


def row_statistics(logits: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """log Σ exp z and −Σ p·log p of z = logits/temperature, per row of logits (C, V). A logit of −inf counts as p = 0.

    Returns (C,), (C,).
    """
    scaled = logits / temperature
    normaliser = scaled.logsumexp(1)
    log_p = scaled.sub_(normaliser[:, None])
    p = log_p.exp()
    entropy = -torch.where(p == 0, 0.0, log_p).mul_(p).sum(1)
    return normaliser, entropy


def softmax_times(logits: Tensor, normaliser: Tensor, factor: Tensor, temperature: float, out: Tensor) -> None:
    """out = factor·exp(z − normaliser), rounded once to out's dtype; `out` may be `logits` itself.

    logits, out (C, V), normaliser, factor (C,).
    """
    out.copy_(torch.div(logits, temperature).sub_(normaliser[:, None]).exp_().mul_(factor[:, None]))


def scale(values: Tensor, factor: Tensor) -> None:
    """values (...) *= factor () in place; a factor of 1 costs nothing."""
    if _uses_triton(values):
        from score_centering.objectives import triton_kernels

        triton_kernels.scale(values, factor)
    elif factor != 1:
        values.mul_(factor)


class _LossFromHidden(Function):
    @staticmethod
    def forward(ctx, hidden, weight, rows, objective, temperature, pieces, needs_gradient):
        core = _Core(rows, objective, temperature)
        arithmetic = _arithmetic(hidden.dtype)
        operand = hidden.dtype if hidden.is_cuda else arithmetic
        weight_operand = weight.to(hidden.dtype).to(operand)
        needs_hidden = needs_gradient and ctx.needs_input_grad[0]
        needs_weight = needs_gradient and ctx.needs_input_grad[1]
        total, width, vocab_size = *hidden.shape, weight.shape[0]
        hidden_gradient = hidden.new_empty(hidden.shape) if needs_hidden else None
        at_once = needs_weight and one_weight_product(total, width, operand, arithmetic)
        # The chunks' size is no part of the result: one product over all rows, or an unrounded sum over the chunks.
        weight_gradient = None
        if needs_weight:
            weight_gradient = weight.new_empty(weight.shape, dtype=weight.dtype if at_once else arithmetic)
        most = max((stop - start for start, stop in pieces), default=0)
        buffer = hidden.new_empty(most, vocab_size, dtype=arithmetic)
        gradient_buffer = buffer
        if operand != arithmetic:
            gradient_buffer = hidden.new_empty(total if at_once else most, vocab_size, dtype=operand)
        states = hidden.new_empty(total if at_once else most, width, dtype=operand)
        for start, stop in pieces:
            place = slice(start, stop) if at_once else slice(0, stop - start)
            states[place] = torch.where(rows.mask[start:stop, None], hidden[start:stop], 0)
            logits = buffer[: stop - start]
            _product(states[place], weight_operand.T, logits)
            if not needs_gradient:
                core.chunk(logits, start, stop, None)
                continue
            gradient = gradient_buffer[place]
            core.chunk(logits, start, stop, gradient)
            if operand != hidden.dtype:
                gradient.copy_(gradient.to(hidden.dtype))  # round as the tensor cores' operand is
            if needs_hidden:
                hidden_gradient[start:stop] = gradient @ weight_operand
            if needs_weight and not at_once:
                _accumulate(weight_gradient, gradient.T, states[place], first=start == 0)
        if at_once:
            _product(gradient_buffer.T, states, weight_gradient)
        elif needs_weight and total == 0:
            weight_gradient.zero_()
        ctx.gradients = (hidden_gradient, None if weight_gradient is None else weight_gradient.to(weight.dtype))
        outputs = core.outputs()
        ctx.mark_non_differentiable(*outputs[1:])
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx, loss_gradient, *unused):
        return (*_scaled(ctx, loss_gradient), None, None, None, None, None)


class _LossFromLogits(Function):
    @staticmethod
    def forward(ctx, logits, rows, objective, temperature, pieces, needs_gradient):
        core = _Core(rows, objective, temperature)
        gradient = logits.new_empty(logits.shape) if needs_gradient else None
        vocab_size = logits.shape[1]
        buffer = logits.new_empty(
            max((stop - start for start, stop in pieces), default=0), vocab_size, dtype=_arithmetic(logits.dtype)
        )
        for start, stop in pieces:
            chunk = buffer[: stop - start].copy_(logits[start:stop])
            chunk.masked_fill_(~rows.mask[start:stop, None], 0)
            core.chunk(chunk, start, stop, gradient[start:stop] if needs_gradient else None)
        ctx.gradients = (gradient,)
        outputs = core.outputs()
        ctx.mark_non_differentiable(*outputs[1:])
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx, loss_gradient, *unused):
        return (*_scaled(ctx, loss_gradient), None, None, None, None, None)


def one_weight_product(tokens: int, width: int, operand: torch.dtype, arithmetic: torch.dtype) -> bool:
    """Whether the gradients of all rows' logits take no more memory than a sum of the weight's gradient would.

    (T, V) of the operands against (V, D) of the sum: T ≤ 2·D for bfloat16 operands. Where the operands are the
    arithmetic's own (CPU, float32, float64) they share the chunk's buffer, and the sum is the result.
    """
    return operand != arithmetic and 0 < tokens * operand.itemsize <= width * arithmetic.itemsize


def _product(left: Tensor, right: Tensor, out: Tensor) -> None:
    """out = left·right with float32 accumulation and, for bfloat16 operands, a float32 result."""
    if left.dtype == out.dtype:
        torch.mm(left, right, out=out)
    else:
        torch.mm(left, right, out_dtype=out.dtype, out=out)


def _accumulate(total: Tensor, left: Tensor, right: Tensor, first: bool) -> None:
    """total = left·right for the first chunk, total += left·right after it."""
    if first:
        _product(left, right, total)
    elif left.dtype == total.dtype:
        total.addmm_(left, right)
    else:
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)


def _scaled(ctx: Function, loss_gradient: Tensor) -> tuple[Tensor | None, ...]:
    """The gradients of forward times that of the loss, in place: they exist once, so backward runs once."""
    if ctx.gradients is None:
        raise RuntimeError("policy loss: backward ran twice; compute the loss again for a second backward")
    gradients, ctx.gradients = ctx.gradients, None
    for gradient in gradients:
        if gradient is not None:
            scale(gradient, loss_gradient)
    return gradients
