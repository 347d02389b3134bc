"""What is optimised: one frozen record per arm, built from the names that the config uses."""

import math
from dataclasses import dataclass, replace

from torch import Tensor

from score_centering.objectives.reduction import REDUCTIONS
from score_centering.objectives.weights import UNWEIGHTED, SequenceWeight, Weight, build_weight

POLICY_LOSSES = ("ppo", "score_centering")


@dataclass(frozen=True)
class Objective:
    """One arm's objective.

    `weight` is f with its bounds. `clip_low` and `clip_high` are PPO's ε (a ratio in [1−clip_low, 1+clip_high]); both
    None means no clipping: the plain weighted score f(p/q)·log p, with or without centering.
    `reduction` says how the token losses of an update are averaged. `score`: whether the sampled token's own score
    counts; without it the correction alone is left (see `drift`).
    """

    name: str
    centering: bool
    weight: Weight = UNWEIGHTED
    clip_low: float | None = None
    clip_high: float | None = None
    reduction: str = "token-mean"
    score: bool = True

    def __post_init__(self) -> None:
        where = f"objective {self.name}"
        if self.reduction not in REDUCTIONS:
            raise ValueError(f"{where}: loss_agg_mode {self.reduction!r} is not one of {', '.join(REDUCTIONS)}")
        if (self.clip_low is None) != (self.clip_high is None):
            raise ValueError(f"{where}: clip_low and clip_high are given together or not at all")
        if self.clip_low is not None and not (0 <= self.clip_low < 1 and 0 <= self.clip_high < math.inf):
            raise ValueError(
                f"{where}: clip_ratio_low {self.clip_low} must lie in [0, 1) and clip_ratio_high {self.clip_high} be "
                "at least 0"
            )
        if self.clips and (self.centering or self.weight != UNWEIGHTED):
            raise ValueError(
                f"{where}: policy_loss ppo clips the ratio to the old policy and takes centering off and is_mode none, "
                f"not centering {'on' if self.centering else 'off'} and {self.weight}; "
                "choose policy_loss score_centering"
            )

        if self.centering and self.weighs_rollouts:
            raise ValueError(
                f"{where}: {self.weight} weighs a whole rollout. Centering subtracts the mean of the weighted score "
                "given the tokens before; with a weight that depends on the tokens after, that mean is over all "
                "continuations, no sum over the recorded head. Take centering off, or an is_mode of single tokens"
            )

    @property
    def weighs_rollouts(self) -> bool:
        """Whether the weight is one number for a whole rollout, so that a rollout's tokens must be seen together."""
        return isinstance(self.weight, SequenceWeight)

    @property
    def clips(self) -> bool:
        """Whether this is PPO's clipped surrogate."""
        return self.clip_low is not None

    @property
    def needs_candidates(self) -> bool:
        """Whether the sampler's head (candidate ids and log-probs) has to be recorded."""
        return self.centering

    def loss_weights(self, lengths: Tensor, update_tokens: int, update_rows: int) -> Tensor:
        """w of loss = Σ_t w_t·ℓ_t for the tokens of rollouts of these `lengths` (N,); (Σ lengths,) float32.

        Args:
            update_tokens, update_rows: generated tokens and rollouts of the whole update.
        """
        return REDUCTIONS[self.reduction](lengths, update_tokens, update_rows)

    def drift(self) -> "Objective":
        """What centering subtracts, alone: loss = Σ_t w_t·A_t·Σ_{v∈H} sg(c_v)·log p_v with this objective's w and f.

        For PPO f = 1, as its first update of a batch has it. ValueError: a weight of whole rollouts, which leaves no
        such sum over the head.
        """
        if self.weighs_rollouts:
            raise ValueError(
                f"objective {self.name}: trainer.drift_freq measures a sum over the recorded head, which the drift "
                f"under {self.weight} is not: it weighs whole rollouts. Set trainer.drift_freq to -1"
            )
        return replace(self, name=f"{self.name}'s drift", centering=True, score=False, clip_low=None, clip_high=None)


def build_objective(
    name: str,
    *,
    policy_loss: str,
    centering: bool,
    is_mode: str,
    clip_ratio_low: float,
    clip_ratio_high: float,
    loss_agg_mode: str,
    **bounds: float,
) -> Objective:
    """The objective that the settings `score_centering.*` and `actor_rollout_ref.actor.*` describe.

    `policy_loss: ppo` clips and needs centering off and is_mode none; `policy_loss: score_centering` never clips, so
    the clip settings are inert there. `bounds` holds those of every weight, of which the chosen one takes its own.
    """
    where = f"objective {name}"
    if policy_loss not in POLICY_LOSSES:
        raise ValueError(
            f"{where}: actor_rollout_ref.actor.policy_loss {policy_loss!r} is not one of {', '.join(POLICY_LOSSES)}"
        )
    try:
        weight = build_weight(is_mode, bounds)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    clips = policy_loss == "ppo"
    return Objective(
        name=name,
        centering=centering,
        weight=weight,
        clip_low=clip_ratio_low if clips else None,
        clip_high=clip_ratio_high if clips else None,
        reduction=loss_agg_mode,
    )
