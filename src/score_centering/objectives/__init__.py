"""The policy loss, importance weights, advantages and K3 metrics: pure functions on tensors that know nothing of
engines."""

from score_centering.objectives.advantages import advantages
from score_centering.objectives.batch import TokenBatch
from score_centering.objectives.loss import LossResult, policy_loss_from_hidden, policy_loss_from_logits
from score_centering.objectives.metrics import add_sums, finalise_metrics
from score_centering.objectives.objective import Objective, build_objective
from score_centering.objectives.reduction import sequence_mean_weights, token_mean_weights
from score_centering.objectives.terms import TokenTerms
from score_centering.objectives.weights import WEIGHTS, build_weight

__all__ = [
    "WEIGHTS",
    "LossResult",
    "Objective",
    "TokenBatch",
    "TokenTerms",
    "add_sums",
    "advantages",
    "build_objective",
    "build_weight",
    "finalise_metrics",
    "policy_loss_from_hidden",
    "policy_loss_from_logits",
    "sequence_mean_weights",
    "token_mean_weights",
]
