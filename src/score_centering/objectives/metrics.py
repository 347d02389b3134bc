"""Sums that add up over microbatches and ranks, and the metrics they give."""

import math

import torch
from torch import Tensor

from score_centering.objectives.batch import TokenBatch, rollout_ranks
from score_centering.objectives.divergence import LOG_RATIO_LIMIT, bounded, k3, token_chi2
from score_centering.objectives.terms import TokenTerms

TOKENS = "tokens"
LOSS = "loss"
MAXIMA = ("abs_logprob_gap_max", "importance_ratio_max")
COUNTS = ("k3_clamped_tokens",)

POSITIONS = 4
ENTROPY_EDGES = (0.1, 0.5, 1.0)
SIGNS = ("positive", "negative")

RATIOS = "ratio_histogram"
RATIO_LIMIT, RATIO_STEP = 10.0, 0.01
"""Nats: log-ratios are counted in bins of RATIO_STEP between ±RATIO_LIMIT, the outer bins holding what lies beyond."""


def token_sums(terms: TokenTerms, batch: TokenBatch) -> dict[str, Tensor]:
    """float64 tensors under the metric's own name, over the rows that the mask keeps.

    `tokens` and `k3_clamped_tokens` are counts, `loss` is Σ w·ℓ, the names in MAXIMA are maxima, the rest are sums over
    tokens. With d = log p_y − log q_y: k1 = −d; the others are `objectives.divergence`'s. A sum over some tokens only
    is a pair (2,) of the sum and their number; `ratio_histogram` counts tokens by d.
    """
    mask = batch.mask

    def over_tokens(values: Tensor) -> Tensor:
        return torch.where(mask, values.double(), 0.0)

    gap = over_tokens(terms.log_p) - over_tokens(batch.sampler_logprobs)
    ratio = torch.where(mask, bounded(gap).exp(), 0.0)
    divergence, gains = k3(gap), over_tokens(batch.advantages)
    entropy = over_tokens(terms.entropy)
    per_token = {
        TOKENS: mask.double(),
        LOSS: over_tokens(batch.loss_weights) * over_tokens(terms.loss),
        "entropy": entropy,
        "k3_kl": divergence,
        "k3_clamped_tokens": (gap.abs() > LOG_RATIO_LIMIT).double(),
        "k1_kl": -gap,
        "abs_logprob_gap_mean": gap.abs(),
        "importance_ratio_mean": ratio,
        "token_chi2": token_chi2(gap),
        "advantage_abs_mean": gains.abs(),
    }
    of_sign = {"positive": mask & (gains > 0), "negative": mask & (gains < 0)}
    some: dict[str, tuple[Tensor, Tensor]] = {}
    if terms.weight is not None:
        masked = (mask & (terms.weight == 0)).double()
        per_token["importance_weight_mean"] = over_tokens(terms.weight)
        per_token["importance_masked_share"] = masked
        some |= {f"importance_masked_share_{sign}": (masked, of_sign[sign]) for sign in SIGNS}
    if terms.clipped is not None:
        clipped = over_tokens(terms.clipped)
        per_token["clip_share"] = clipped
        some |= {f"clip_share_{sign}": (clipped, of_sign[sign]) for sign in SIGNS}
    if terms.correction_abs is not None:
        per_token["head_mass_sampler"] = over_tokens(terms.head_mass_sampler)
        per_token["head_mass_trainer"] = over_tokens(terms.head_mass_trainer)
        per_token["correction_abs_mean"] = over_tokens(terms.correction_abs)
    # Edges as numbers: to make a tensor of them, the host would wait for the GPU.
    band = sum((entropy >= edge).long() for edge in ENTROPY_EDGES)
    some |= {f"k3_kl_entropy_{i + 1}": (divergence, mask & (band == i)) for i in range(len(ENTROPY_EDGES) + 1)}
    if batch.sequence_ids is not None:
        part = _parts(batch)
        some |= {f"k3_kl_position_{i + 1}": (divergence, mask & (part == i)) for i in range(POSITIONS)}
    sums = {name: values.sum() for name, values in per_token.items()}
    sums |= {name: torch.stack([torch.where(rows, v, 0.0).sum(), rows.sum()]) for name, (v, rows) in some.items()}
    sums[RATIOS] = _histogram(gap, mask)
    if mask.numel() == 0:
        zero = torch.zeros((), dtype=torch.float64, device=mask.device)
        return sums | dict.fromkeys(MAXIMA, zero)
    return sums | {"abs_logprob_gap_max": gap.abs().max(), "importance_ratio_max": ratio.max()}


def _parts(batch: TokenBatch) -> Tensor:
    """(T,) int64: ⌊4·i/L⌋ of the i-th of a rollout's L tokens, i from 0: which quarter of the response it lies in."""
    ranks, kept = rollout_ranks(batch.sequence_ids, batch.mask), batch.mask.long()
    lengths = torch.zeros_like(kept).index_add(0, ranks, kept)
    starts = lengths.cumsum(0) - lengths
    return POSITIONS * (kept.cumsum(0) - 1 - starts[ranks]) // lengths[ranks].clamp_min(1)


def _histogram(gap: Tensor, mask: Tensor) -> Tensor:
    """(bins,) float64: how many d lie in (edge − RATIO_STEP, edge] of each upper edge."""
    bins = 2 * round(RATIO_LIMIT / RATIO_STEP) + 1
    index = torch.ceil((gap.nan_to_num(RATIO_LIMIT) + RATIO_LIMIT) / RATIO_STEP - 1e-9).clamp(0, bins - 1).long()
    return torch.zeros(bins, dtype=torch.float64, device=gap.device).index_add(0, index, mask.double())


def _quantile(histogram: list[float], share: float) -> float:
    """The ratio at the upper edge of the bin where `share` of the tokens is reached."""
    wanted, seen = share * sum(histogram), 0.0
    for index, count in enumerate(histogram):
        seen += count
        if seen >= wanted:
            return math.exp(index * RATIO_STEP - RATIO_LIMIT)
    raise ValueError("metrics: the update holds no generated token")


def add_sums(total: dict[str, Tensor] | None, part: dict[str, Tensor]) -> dict[str, Tensor]:
    """`total` and the sums of one more microbatch or rank: sums and counts add, the names in MAXIMA take the larger."""
    if total is None:
        return dict(part)
    if total.keys() != part.keys():
        raise ValueError(
            f"sums of different objectives: {sorted(total.keys() ^ part.keys())} are in one of the two only"
        )
    return {
        name: torch.maximum(total[name], part[name]) if name in MAXIMA else total[name] + part[name] for name in total
    }


def finalise_metrics(sums: dict[str, Tensor]) -> dict[str, float | None]:
    """Metrics of one update from its sums over all microbatches and ranks; means are over generated tokens.

    A metric that the objective does not have (head masses without centering, clip share without a clip) is absent; one
    over tokens of a kind that the update has none of is None.
    """
    values = {name: value.tolist() for name, value in sums.items()}
    tokens = values.pop(TOKENS)
    if tokens == 0:
        raise ValueError("metrics: the update holds no generated token")
    ratios = values.pop(RATIOS)
    whole = (LOSS, *MAXIMA, *COUNTS)
    metrics: dict[str, float | None] = {}
    for name, value in values.items():
        if isinstance(value, list):
            total, count = value
            metrics[name] = total / count if count else None
        else:
            metrics[name] = value if name in whole else value / tokens
    metrics["importance_ratio_p99"] = _quantile(ratios, 0.99)
    metrics["effective_sample_share"] = metrics["importance_ratio_mean"] ** 2 / (metrics["token_chi2"] + 1)
    return metrics | {name: int(metrics[name]) for name in COUNTS}
