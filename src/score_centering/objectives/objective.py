"""What is optimised: one frozen record per arm, built from the names that the config uses."""

import math
from dataclasses import dataclass, replace

from torch import Tensor

from score_centering.objectives.reduction import REDUCTIONS
from score_centering.objectives.weights import UNWEIGHTED, Weight, build_weight

POLICY_LOSSES = ("ppo", "score_centering")

SEQUENCE_LEVEL = {
    "gspo": "GSPO weights a whole rollout by one ratio, the length-normalised sequence likelihood, while score "
    "centering and every weight here act on one token: no per-token f(p/q) gives it",
}


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

        For PPO f = 1, as its first update of a batch has it.
        """
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
    reason = next((f"; {SEQUENCE_LEVEL[key]}" for key in (policy_loss, is_mode) if key in SEQUENCE_LEVEL), "")
    if policy_loss not in POLICY_LOSSES:
        raise ValueError(
            f"{where}: actor_rollout_ref.actor.policy_loss {policy_loss!r} is not one of "
            f"{', '.join(POLICY_LOSSES)}{reason}"
        )
    try:
        weight = build_weight(is_mode, bounds)
    except ValueError as error:
        raise ValueError(f"{where}: {error}{reason}") from None
    clips = policy_loss == "ppo"
    return Objective(
        name=name,
        centering=centering,
        weight=weight,
        clip_low=clip_ratio_low if clips else None,
        clip_high=clip_ratio_high if clips else None,
        reduction=loss_agg_mode,
    )
