"""Tokens and logs of two distributions that are known exactly, with one fault each. No engine, no model."""

from collections.abc import Callable

import numpy as np

from score_centering.diagnosis.readers import Log, Series
from score_centering.diagnosis.tokens import Tokens

VOCABULARY, LENGTH = 64, 20


def log_softmax(x: np.ndarray) -> np.ndarray:
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def batch(
    seed: int,
    rollouts: int = 60,
    *,
    sampler_temperature: float = 1.0,
    trainer_temperature: float = 1.0,
    noise: float = 0.0,
    top_p: float = 1.0,
    recorded: Callable[[np.ndarray], np.ndarray] | None = None,
    shift: int = 0,
    cut: float = 0.0,
) -> tuple[Tokens, np.ndarray]:
    """Tokens drawn from q, with log q as recorded, log p, heads of 8; and the trainer's entropy (N,).

    Args:
        noise: standard deviation of the sampler's logit errors.
        recorded: logits to the log-probs that are recorded; default: those of the distribution that is sampled.
        shift: positions by which the recorded log-probs are late.
        cut: share of rollouts that lose a token, so that their later log-probs are misaligned.
    """
    rng = np.random.default_rng(seed)
    size = rollouts * LENGTH
    logits = rng.normal(0, 2.5, (size, VOCABULARY))
    logq = log_softmax((logits + rng.normal(0, noise, logits.shape)) / sampler_temperature)
    logp = log_softmax(logits / trainer_temperature)
    if top_p < 1:
        ordered = -np.sort(-np.exp(logq), axis=1)
        last = (ordered.cumsum(1) - ordered < top_p).sum(1) - 1
        logq = np.where(np.exp(logq) >= ordered[np.arange(size), last][:, None], logq, -1e3)
        logq = log_softmax(logq)
    token = (np.exp(logq).cumsum(1) < rng.random((size, 1))).sum(1).clip(0, VOCABULARY - 1)
    rows = np.arange(size)
    kept = logq if recorded is None else recorded(logits)
    q, p = kept[rows, token], logp[rows, token]
    owner, position = rows // LENGTH, rows % LENGTH
    if shift:
        q = np.concatenate([np.roll(q[owner == i], shift) for i in range(rollouts)])
    for rollout in range(rollouts) if cut else ():
        if rng.random() < cut:
            start = rollout * LENGTH + int(rng.integers(1, LENGTH // 2))
            q[start : (rollout + 1) * LENGTH - 1] = q[start + 1 : (rollout + 1) * LENGTH]
    head = np.argsort(-logq, axis=1)[:, :8]
    advantage = np.repeat(rng.normal(0, 1, rollouts), LENGTH)
    entropy = -(np.exp(logp) * logp).sum(1)
    tokens = Tokens(
        owner, position, q, p, advantage, entropy, token, head,
        np.take_along_axis(kept, head, 1), np.take_along_axis(logp, head, 1),
    )  # fmt: skip
    return tokens, entropy


def log_of(steps: int = 10, **fault) -> Log:
    """The log that a framework would write of `steps` such batches."""
    columns: dict[str, list[float]] = {}
    for step in range(steps):
        tokens, entropy = batch(step, **fault)
        gap = tokens.gap
        row = {
            "reward": 0.5,
            "k3_kl": np.mean(np.exp(gap) - 1 - gap),
            "k1_kl": np.mean(-gap),
            "abs_gap": np.mean(np.abs(gap)),
            "chi2": np.mean(np.exp(2 * gap)) - 1,
            "trainer_nll": -tokens.p.mean(),
            "sampler_nll": -tokens.q.mean(),
            "entropy": entropy.mean(),
            "length": float(LENGTH),
            "learning_rate": 1e-6,
        }
        for name, value in row.items():
            columns.setdefault(name, []).append(float(value))
    index = np.arange(1, steps + 1)
    return Log("simulated", {name: Series(index, np.array(values)) for name, values in columns.items()})


def log_from(**columns) -> Log:
    """A log of the given values, one a step from 1 on; numbers are repeated."""
    steps = max(len(np.atleast_1d(values)) for values in columns.values())
    index = np.arange(1, steps + 1)
    return Log(
        "made up",
        {name: Series(index, np.broadcast_to(np.asarray(v, np.float64), steps).copy()) for name, v in columns.items()},
    )
