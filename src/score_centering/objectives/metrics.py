"""Sums that add up over microbatches and ranks, and the metrics they give."""

import torch
from torch import Tensor

from score_centering.objectives.batch import TokenBatch
from score_centering.objectives.divergence import LOG_RATIO_LIMIT, bounded, k3, token_chi2
from score_centering.objectives.terms import TokenTerms

TOKENS = "tokens"
LOSS = "loss"
MAXIMA = ("abs_logprob_gap_max", "importance_ratio_max")
COUNTS = ("k3_clamped_tokens",)


def token_sums(terms: TokenTerms, batch: TokenBatch) -> dict[str, Tensor]:
    """float64 scalars under the metric's own name, over the rows that the mask keeps.

    `tokens` and `k3_clamped_tokens` are counts, `loss` is Σ w·ℓ, the names in MAXIMA are maxima, the rest are sums over
    tokens. With d = log p_y − log q_y: k1 = −d; the others are `objectives.divergence`'s.
    """
    mask = batch.mask

    def over_tokens(values: Tensor) -> Tensor:
        return torch.where(mask, values.double(), 0.0)

    gap = over_tokens(terms.log_p) - over_tokens(batch.sampler_logprobs)
    per_token = {
        TOKENS: mask.double(),
        LOSS: over_tokens(batch.loss_weights) * over_tokens(terms.loss),
        "entropy": over_tokens(terms.entropy),
        "k3_kl": k3(gap),
        "k3_clamped_tokens": (gap.abs() > LOG_RATIO_LIMIT).double(),
        "k1_kl": -gap,
        "abs_logprob_gap_mean": gap.abs(),
        "token_chi2": token_chi2(gap),
        "advantage_abs_mean": over_tokens(batch.advantages).abs(),
    }
    if terms.weight is not None:
        per_token["importance_weight_mean"] = over_tokens(terms.weight)
        per_token["importance_masked_share"] = (mask & (terms.weight == 0)).double()
    if terms.clipped is not None:
        per_token["clip_share"] = over_tokens(terms.clipped)
    if terms.correction_abs is not None:
        per_token["head_mass_sampler"] = over_tokens(terms.head_mass_sampler)
        per_token["head_mass_trainer"] = over_tokens(terms.head_mass_trainer)
        per_token["correction_abs_mean"] = over_tokens(terms.correction_abs)
    sums = {name: values.sum() for name, values in per_token.items()}
    if mask.numel() == 0:
        zero = torch.zeros((), dtype=torch.float64, device=mask.device)
        return sums | dict.fromkeys(MAXIMA, zero)
    sums["abs_logprob_gap_max"] = gap.abs().max()
    sums["importance_ratio_max"] = torch.where(mask, bounded(gap).exp(), 0.0).max()
    return sums


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


def finalise_metrics(sums: dict[str, Tensor]) -> dict[str, float]:
    """Metrics of one update from its sums over all microbatches and ranks; means are over generated tokens.

    A metric that the objective does not have (head masses without centering, clip share without a clip) is absent.
    """
    values = {name: float(value) for name, value in sums.items()}
    tokens = values.pop(TOKENS)
    if tokens == 0:
        raise ValueError("metrics: the update holds no generated token")
    whole = (LOSS, *MAXIMA, *COUNTS)
    metrics = {name: value if name in whole else value / tokens for name, value in values.items()}
    return metrics | {name: int(metrics[name]) for name in COUNTS}
