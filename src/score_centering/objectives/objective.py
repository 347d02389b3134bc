"""What is optimised: one frozen record per arm, built from the names that the config uses."""

import math
from dataclasses import dataclass

from score_centering.objectives.weights import WEIGHTS, Bounds

REDUCTIONS = ("token-mean", "seq-mean-token-mean")
POLICY_LOSSES = ("ppo", "score_centering")

SEQUENCE_LEVEL = {
    "gspo": "GSPO weights a whole rollout by one ratio, the length-normalised sequence likelihood, while score "
    "centering and every weight here act on one token: no per-token f(p/q) gives it",
}


@dataclass(frozen=True)
class Objective:
    """One arm's objective.

    `clip_low` and `clip_high` are PPO's ε (a ratio in [1−clip_low, 1+clip_high]); both None means no clipping: the
    plain weighted score f(p/q)·log p, with or without centering.
    `reduction` names the loss weights that belong to the arm: `token_mean_weights` or `sequence_mean_weights`.
    """

    name: str
    centering: bool
    is_mode: str
    tis_max: float = 2.0
    mis_min: float = 0.5
    mis_max: float = 5.0
    clip_low: float | None = None
    clip_high: float | None = None
    reduction: str = "token-mean"

    def __post_init__(self) -> None:
        where = f"objective {self.name}"
        if self.is_mode not in WEIGHTS:
            reason = f"; {SEQUENCE_LEVEL[self.is_mode]}" if self.is_mode in SEQUENCE_LEVEL else ""
            raise ValueError(f"{where}: is_mode {self.is_mode!r} is not one of {', '.join(WEIGHTS)}{reason}")
        if self.reduction not in REDUCTIONS:
            raise ValueError(f"{where}: loss_agg_mode {self.reduction!r} is not one of {', '.join(REDUCTIONS)}")
        if not 0 < self.tis_max < math.inf:
            raise ValueError(f"{where}: tis_max {self.tis_max} must be positive and finite")
        if not 0 < self.mis_min <= 1 <= self.mis_max < math.inf:
            raise ValueError(
                f"{where}: the band [mis_min, mis_max] = [{self.mis_min}, {self.mis_max}] must be positive, finite and "
                "hold 1"
            )
        if (self.clip_low is None) != (self.clip_high is None):
            raise ValueError(f"{where}: clip_low and clip_high are given together or not at all")
        if self.clip_low is not None and not (0 <= self.clip_low < 1 and 0 <= self.clip_high < math.inf):
            raise ValueError(
                f"{where}: clip_ratio_low {self.clip_low} must lie in [0, 1) and clip_ratio_high {self.clip_high} be "
                "at least 0"
            )
        if self.clips and (self.centering or self.is_mode != "none"):
            raise ValueError(
                f"{where}: policy_loss ppo clips the ratio to the old policy and takes centering off and is_mode none, "
                f"not centering {'on' if self.centering else 'off'} and is_mode {self.is_mode}; "
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

    @property
    def bounds(self) -> Bounds:
        return Bounds(self.tis_max, self.mis_min, self.mis_max)


def build_objective(
    name: str,
    *,
    policy_loss: str,
    centering: bool,
    is_mode: str,
    tis_max: float,
    mis_min: float,
    mis_max: float,
    clip_ratio_low: float,
    clip_ratio_high: float,
    loss_agg_mode: str,
) -> Objective:
    """The objective that the settings `score_centering.*` and `actor_rollout_ref.actor.*` describe.

    `policy_loss: ppo` clips and needs centering off and is_mode none; `policy_loss: score_centering` never clips, so
    the clip settings are inert there.
    """
    if policy_loss not in POLICY_LOSSES:
        reason = f"; {SEQUENCE_LEVEL[policy_loss]}" if policy_loss in SEQUENCE_LEVEL else ""
        raise ValueError(
            f"objective {name}: actor_rollout_ref.actor.policy_loss {policy_loss!r} is not one of "
            f"{', '.join(POLICY_LOSSES)}{reason}"
        )
    clips = policy_loss == "ppo"
    return Objective(
        name=name,
        centering=centering,
        is_mode=is_mode,
        tis_max=tis_max,
        mis_min=mis_min,
        mis_max=mis_max,
        clip_low=clip_ratio_low if clips else None,
        clip_high=clip_ratio_high if clips else None,
        reduction=loss_agg_mode,
    )
