"""What each framework calls the quantities that a diagnosis reads. Names were taken from the frameworks' sources.

One table, searched from the top: the first name that a log has is the one that is used. `--column` overrides it.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from score_centering.settings import UserError

QUANTITIES = {  # name: what it is, unit
    "reward": "mean reward of the step's rollouts",
    "clean_reward": "reward of the trained weights sampled in the trainer's own precision",
    "val_reward": "reward on held-out problems",
    "k3_kl": "mean of exp(d) − 1 − d, d = log p − log q, nats a token",
    "k1_kl": "mean of −d, nats a token",
    "abs_gap": "mean of |d|, nats",
    "abs_gap_max": "largest |d|, nats",
    "correlation": "Pearson correlation of p and q over the sampled tokens",
    "ratio_mean": "mean of p/q, before any truncation",
    "ratio_max": "largest p/q",
    "chi2": "mean of (p/q)² − 1",
    "ess": "effective sample size over tokens, as a share",
    "trainer_nll": "mean of −log p of the sampled tokens, nats",
    "sampler_nll": "mean of −log q of the sampled tokens, nats",
    "entropy": "mean entropy of the trainer's distribution, nats a token",
    "length": "generated tokens of a rollout",
    "truncated": "share of rollouts cut at the response limit",
    "grad_norm": "norm of the gradient before clipping",
    "learning_rate": "learning rate",
    "loss": "value of the objective",
    "advantage": "mean |advantage|",
    "policy_kl": "KL between the trainer's weights before and within the update",
    "clip_share": "share of tokens whose policy ratio was clipped",
    "masked_share": "share of tokens that an importance weight masks",
    "weight_mean": "mean importance weight of the loss",
    "sampler_age": "updates since the sampler's weights were refreshed",
    "drift_share": "norm of the drift over that of the gradient",
    "drift_coherence": "norm of the mean drift over the mean of its norms",
    "nonfinite": "updates skipped as not finite",
}

OURS = "score-centering"
STEP_NAMES = (
    "step",
    "training/global_step",
    "trainer/global_step",
    "train/global_step",
    "global_step",
    "train/step",
    "rollout/step",
    "progress/step",
    "_step",
    "Step",
)


@dataclass(frozen=True)
class Name:
    """One known name of a quantity. `pattern` is matched against the whole name."""

    quantity: str
    pattern: str
    framework: str
    shift: float = 0.0  # added to each value: a ratio that is centred on 1 becomes a gap

    def matches(self, column: str) -> bool:
        return re.fullmatch(self.pattern, column) is not None

    def values(self, values: np.ndarray) -> np.ndarray:
        return values + self.shift if self.shift else values


def _names(framework: str, table: Mapping[str, str | tuple[str, ...]]) -> list[Name]:
    return [
        Name(quantity, pattern, framework)
        for quantity, patterns in table.items()
        for pattern in ([patterns] if isinstance(patterns, str) else patterns)
    ]


NAMES: tuple[Name, ...] = (
    *_names(
        OURS,
        {
            "reward": ("reward_mean", "reward_rollouts"),
            "clean_reward": "clean_reward_mean",
            "val_reward": "val_reward_mean",
            "k3_kl": "k3_kl",
            "k1_kl": "k1_kl",
            "abs_gap": "abs_logprob_gap_mean",
            "abs_gap_max": "abs_logprob_gap_max",
            "ratio_max": "importance_ratio_max",
            "chi2": "token_chi2",
            "ess": "effective_sample_share",
            "ratio_mean": "importance_ratio_mean",
            "entropy": "entropy",
            "length": "response_length_mean",
            "truncated": "truncated_share",
            "grad_norm": "grad_norm",
            "learning_rate": "learning_rate",
            "loss": "loss",
            "advantage": "advantage_abs_mean",
            "clip_share": "clip_share",
            "masked_share": "importance_masked_share",
            "weight_mean": "importance_weight_mean",
            "trainer_nll": "trainer_nll",
            "sampler_nll": "sampler_nll",
            "sampler_age": "sampler_age",
            "drift_share": "drift_share",
            "drift_coherence": "drift_coherence",
            "nonfinite": "nonfinite_updates",
        },
    ),
    *_names(
        "verl",  # trainer/ppo/metric_utils.py, rollout_corr_helper.py, utils/debug/metrics.py of 0.8.0
        {
            "reward": ("critic/score/mean", "critic/rewards/mean"),
            "val_reward": (r"val-core/(?!.*clean_reward).*/mean@\d+", r"val/test_score/.*"),
            "k3_kl": ("rollout_corr/k3_kl", "mismatch/mismatch_k3_kl"),
            "k1_kl": ("rollout_corr/kl", "mismatch/mismatch_kl"),
            "clean_reward": r"val-core/.*/clean_reward/mean@1",  # this and some others: our runs under verl's names
            "abs_gap": "rollout_corr/abs_logprob_gap_mean",
            "abs_gap_max": "rollout_corr/abs_logprob_gap_max",
            "advantage": "critic/advantages/abs_mean",
            "nonfinite": "actor/nonfinite_updates",
            "correlation": "training/rollout_actor_probs_pearson_corr",
            "ratio_max": ("rollout_corr/importance_ratio_max", "rollout_corr/rollout_is_max"),
            "chi2": "rollout_corr/chi2_token",
            "ratio_mean": "rollout_corr/importance_ratio_mean",
            "drift_share": "score_centering/drift_share",
            "drift_coherence": "score_centering/drift_coherence",
            "ess": (
                "rollout_corr/effective_sample_share",
                "rollout_corr/rollout_is_eff_sample_size",
                "mismatch/rollout_is_eff_sample_size",
            ),
            "trainer_nll": ("rollout_corr/training_log_ppl", "mismatch/mismatch_training_log_ppl"),
            "sampler_nll": ("rollout_corr/rollout_log_ppl", "mismatch/mismatch_rollout_log_ppl"),
            "entropy": ("actor/entropy", "actor/entropy_loss"),
            "length": "response_length/mean",
            "truncated": "response_length/clip_ratio",
            "grad_norm": "actor/grad_norm",
            "learning_rate": "actor/lr",
            "loss": "actor/pg_loss",
            "policy_kl": "actor/ppo_kl",
            "clip_share": "actor/pg_clipfrac",
            "weight_mean": "rollout_corr/rollout_is_mean",
            "masked_share": ("rollout_corr/rollout_rs_masked_fraction", "rollout_corr/rollout_is_oob_ratio"),
            "sampler_age": (
                "rollout_corr/sampler_age",
                "training/off_policy/staleness/mean",
                "fully_async/.*staleness.*",
            ),
        },
    ),
    *_names(
        "trl",  # trl/trainer/grpo_trainer.py: log_history of trainer_state.json
        {
            "reward": "reward",
            "val_reward": "eval_reward",
            "abs_gap": "sampling/sampling_logp_difference/mean",
            "abs_gap_max": "sampling/sampling_logp_difference/max",
            "ratio_max": "sampling/importance_sampling_ratio/max",  # its mean is taken after truncation: not used
            "entropy": "entropy",
            "length": "completions/mean_length",
            "truncated": "completions/clipped_ratio",
            "grad_norm": "grad_norm",
            "learning_rate": "learning_rate",
            "loss": "loss",
            "clip_share": ("clip_ratio/region_mean", "clip_ratio"),
        },
    ),
    *_names(
        "prime-rl",  # src/prime_rl/trainer/rl/train.py and the orchestrator's metrics
        {
            "reward": (r"train/agg/(?:effective|all)/reward/mean", r"reward/(?:all/)?mean", "Reward"),
            "val_reward": r"eval/[^/]+/avg@\d+",
            "k3_kl": (r"mismatch_kl/(?:all/)?mean", "Mismatch KL"),
            "entropy": (r"entropy/(?:all/)?mean", "Entropy"),
            "length": (
                r"train/agg/(?:effective|all)/num_output_tokens/mean",
                r"(?:seq_len|completion_len|decode_len)/(?:all/)?mean",
                r"Seq\. Length",
            ),
            "truncated": (r"train/agg/(?:effective|all)/is_truncated/mean", r"is_truncated/(?:all/)?mean"),
            "grad_norm": ("optim/grad_norm", r"Grad\. Norm"),
            "learning_rate": ("optim/lr", "LR"),
            "loss": ("loss/mean", "Loss"),
            "masked_share": r"is_masked/(?:all/)?mean",
            "sampler_age": (r"off_policy_level/(?:all/)?mean", r"batch/off_policy_level/mean"),
        },
    ),
    *_names(
        "skyrl",  # skyrl_train/trainer.py, workers/worker.py
        {
            "reward": ("reward/avg_raw_reward", "loss/avg_final_rewards"),
            "val_reward": r"eval/all/(?:avg_score|pass_at_\d+)",
            "abs_gap": ("policy/rollout_train_logprobs_abs_diff_mean", "policy/tis/log_ratio_abs_mean"),
            "abs_gap_max": "policy/rollout_train_logprobs_abs_diff_max",
            "entropy": "policy/policy_entropy",
            "length": "generate/avg_num_tokens",
            "truncated": "consumed/length_stop_fraction",
            "grad_norm": ("policy/raw_grad_norm", "policy/grad_norm"),
            "learning_rate": "policy/policy_lr",
            "loss": ("policy/policy_loss", "policy/final_loss"),
            "policy_kl": "policy/ppo_kl",
            "clip_share": "policy/ppo_clip_ratio",
            "sampler_age": "async/staleness_mean",
        },
    ),
    *_names(
        "slime",  # slime/backends/megatron_utils, and miles, which keeps the names
        {
            "reward": ("rollout/raw_reward", "rollout/rewards"),
            "val_reward": r"eval/[^/]+",
            "k3_kl": "train/mis_k3_kl",
            "k1_kl": ("train/mis_kl", "train/train_rollout_kl"),
            "abs_gap": "train/train_rollout_logprob_abs_diff",
            "chi2": "train/mis_chi2_token",
            "trainer_nll": "train/mis_training_log_ppl",
            "sampler_nll": "train/mis_rollout_log_ppl",
            "entropy": "train/entropy_loss",
            "length": ("rollout/response_len/mean", "rollout/response_lengths"),
            "truncated": ("rollout/truncated_ratio", "rollout/truncated"),
            "grad_norm": "train/grad_norm",
            "learning_rate": r"train/lr-pg_0",
            "loss": ("train/pg_loss", "train/loss"),
            "policy_kl": "train/ppo_kl",
            "clip_share": "train/pg_clipfrac",
            "sampler_age": ("rollout/fully_async/avg_staleness", "polar/staleness/mean"),
        },
    ),
    *_names(
        "nemo-rl",  # nemo_rl/algorithms/grpo.py, loss_functions.py
        {
            "reward": "train/reward",
            "val_reward": "validation/accuracy",
            "k3_kl": "train/gen_kl_error",
            "ratio_mean": "train/sampling_importance_ratio",
            "entropy": "train/approx_entropy",
            "length": "train/mean_gen_tokens_per_sample",
            "truncated": "train/backend_length_termination_rate",
            "grad_norm": "train/grad_norm",
            "learning_rate": "train/lr",
            "loss": "train/loss",
            "sampler_age": "train/avg_trajectory_age",
        },
    ),
    Name("abs_gap", "train/token_mult_prob_error", "nemo-rl", shift=-1.0),  # mean of exp |d|
)


@dataclass(frozen=True)
class Choice:
    """Which column of a log a quantity was read from."""

    quantity: str
    column: str
    framework: str  # "--column" where the user said so
    shift: float = 0.0


def choose(columns: Iterable[str], overrides: Mapping[str, str] | None = None) -> dict[str, Choice]:
    """For each quantity that `columns` offer, the column to read it from.

    A name that two frameworks share goes to the one that most of the log's names belong to.

    Raises:
        UserError: an override names no quantity, or a column that the log lacks.
    """
    columns = list(columns)
    found = [(name, column) for name in NAMES for column in columns if name.matches(column)]
    votes: dict[str, set[str]] = {}
    for name, column in found:
        votes.setdefault(name.framework, set()).add(column)
    rank = sorted(votes, key=lambda framework: -len(votes[framework]))
    chosen: dict[str, Choice] = {}
    for name, column in sorted(found, key=lambda pair: rank.index(pair[0].framework)):  # stable: the table's order
        chosen.setdefault(name.quantity, Choice(name.quantity, column, name.framework, name.shift))
    for quantity, column in (overrides or {}).items():
        if quantity not in QUANTITIES:
            raise UserError(f"--column {quantity}={column}: no such quantity; allowed are {', '.join(QUANTITIES)}")
        if column not in columns:
            raise UserError(f"--column {quantity}={column}: the log has no such column; it has {', '.join(columns)}")
        chosen[quantity] = Choice(quantity, column, "--column")
    return {quantity: chosen[quantity] for quantity in QUANTITIES if quantity in chosen}


def framework(choices: Mapping[str, Choice]) -> str:
    """The framework that most of the chosen names belong to; "unknown" where none does."""
    known = [choice.framework for choice in choices.values() if choice.framework != "--column"]
    return max(known, key=known.count) if known else "unknown"
