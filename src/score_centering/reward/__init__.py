"""Rewards: 1 where the last boxed answer equals the gold answer, else 0; nothing an answer holds can hang the run."""

from score_centering.reward.answers import final_answer
from score_centering.reward.scorer import Scorer, ScoreResult

__all__ = ["ScoreResult", "Scorer", "final_answer"]
