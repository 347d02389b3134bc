"""The objective that an arm's settings describe."""

from score_centering.objectives import Objective, build_objective
from score_centering.settings import UserError
from score_centering.settings.stages import TrainStage


def arm_objective(stage: TrainStage, arm: str) -> Objective:
    """The objective of `arm` by its resolved settings.

    Raises:
        UserError: settings that describe none, with the reason.
    """
    actor, centering = stage.actor_rollout_ref.actor, stage.score_centering
    freq = stage.trainer.drift_freq
    if freq > 0 and not centering.candidates:
        raise UserError(
            f"objective {arm}: trainer.drift_freq = {freq} measures with the sampler's candidates: set "
            "score_centering.enabled to true for this arm, or drift_freq to -1"
        )
    try:
        objective = build_objective(
            arm,
            policy_loss=actor.policy_loss,
            clip_ratio_low=actor.clip_ratio_low,
            clip_ratio_high=actor.clip_ratio_high,
            loss_agg_mode=actor.loss_agg_mode,
            **centering.model_dump(exclude={"enabled", "top_logprobs_num"}),
        )
        if freq > 0:
            objective.drift()
    except ValueError as error:
        raise UserError(str(error)) from None
    return objective
