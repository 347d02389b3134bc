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
    try:
        return build_objective(
            arm,
            policy_loss=actor.policy_loss,
            centering=centering.centering,
            is_mode=centering.is_mode,
            tis_max=centering.tis_max,
            mis_min=centering.mis_min,
            mis_max=centering.mis_max,
            clip_ratio_low=actor.clip_ratio_low,
            clip_ratio_high=actor.clip_ratio_high,
            loss_agg_mode=actor.loss_agg_mode,
        )
    except ValueError as error:
        raise UserError(str(error)) from None
