"""Rollouts with the log-probs of both sides: what only tokens can tell. Reads parquet and JSON lines.

A row is a token, or a rollout with one list a column. Names of other frameworks are known; all log-probs in nats.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from score_centering.diagnosis.signatures import Signature
from score_centering.settings import UserError

NAMES: dict[str, tuple[str, ...]] = {
    "q": (
        "sampler_logprob",
        "sampler_logprobs",
        "rollout_log_probs",
        "rollout_logprobs",
        "sampling_per_token_logps",
        "inference_logprobs",
        "generation_logprobs",
        "logprobs",
    ),
    "p": (
        "trainer_logprob",
        "trainer_logprobs",
        "old_log_probs",
        "old_per_token_logps",
        "prev_logprobs",
        "log_probs",
        "actor_logprobs",
    ),
    "advantage": ("advantage", "advantages"),
    "entropy": ("entropy", "entropies", "trainer_entropy"),
    "mask": ("response_mask", "loss_mask", "completion_mask", "token_mask"),
    "rollout": ("rollout", "rollout_id", "sample", "sample_id", "sample_index"),
    "position": ("position", "token_position"),
    "token": ("token_id", "token_ids", "response_ids", "responses"),
    "head_token": ("candidate_ids",),
    "head_q": ("candidate_logprobs", "candidate_sampler_logprobs"),
    "head_p": ("candidate_trainer_logprobs",),
}
MAX_SHIFT = 3
BINS = 4


@dataclass(frozen=True, eq=False)
class Tokens:
    """N generated tokens of all rollouts, rollout after rollout, positions rising. Masked ones are left out."""

    rollout: np.ndarray  # (N,) int64
    position: np.ndarray  # (N,) int64, within the rollout
    q: np.ndarray  # (N,) float64, the sampler's log-prob
    p: np.ndarray  # (N,) float64, the trainer's
    advantage: np.ndarray | None = None  # (N,) float64
    entropy: np.ndarray | None = None  # (N,) float64
    token: np.ndarray | None = None  # (N,) int64
    head_token: np.ndarray | None = None  # (N, K) int64
    head_q: np.ndarray | None = None  # (N, K) float64
    head_p: np.ndarray | None = None  # (N, K) float64

    @property
    def gap(self) -> np.ndarray:
        """d = log p − log q, clamped to ±20 as in K3."""
        return np.clip(self.p - self.q, -20, 20)


def read_tokens(folder: str | Path) -> Tokens:
    """Every *.parquet and *.jsonl below `folder`, or one such file.

    Raises:
        UserError: no such file, no log-probs of both sides, or lists of unequal length.
    """
    folder = Path(folder)
    files = sorted(file for pattern in ("**/*.parquet", "**/*.jsonl") for file in folder.glob(pattern))
    files = [folder] if folder.is_file() else files
    if not files:
        raise UserError(f"{folder}: no *.parquet or *.jsonl with rollouts")
    return _concatenated([_tokens(_rows(file), file) for file in files])


def _rows(file: Path) -> list[Mapping[str, Any]]:
    if file.suffix == ".parquet":
        try:
            return pq.read_table(file).to_pylist()
        except (pa.ArrowException, OSError) as error:
            raise UserError(f"{file}: not a readable parquet file: {' '.join(str(error).split())[:160]}") from None
    try:
        return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    except json.JSONDecodeError as error:
        raise UserError(f"{file}: not JSON lines: {error}") from None


def _tokens(rows: Sequence[Mapping[str, Any]], file: Path) -> Tokens:
    first = rows[0] if rows else {}
    names = {
        field: next((name for name in known if first.get(name) is not None), None) for field, known in NAMES.items()
    }
    for side, what in (("q", "the sampler's"), ("p", "the trainer's")):
        if names[side] is None:
            raise UserError(f"{file}: no column with {what} log-probs; known names are {', '.join(NAMES[side])}")
    lists = isinstance(first[names["q"]], list)
    columns: dict[str, list[Any]] = {field: [] for field, name in names.items() if name is not None}
    owner: list[int] = []
    for number, row in enumerate(rows):
        size = len(row[names["q"]]) if lists else 1
        for field in columns:
            value = row[names[field]]
            values = list(value) if lists and isinstance(value, list) else [value] * size if lists else [value]
            if len(values) != size:
                raise UserError(f"{file}: row {number + 1}: {names[field]} has {len(values)} entries, must be {size}")
            columns[field].extend(values)
        owner.extend([number] * size)
    arrays = {field: np.asarray(values) for field, values in columns.items()}
    rollout = arrays.get("rollout", np.array(owner)) if not lists else np.array(owner)
    if "rollout" not in arrays and not lists:
        raise UserError(f"{file}: one row a token needs a column that tells rollouts apart, such as `rollout`")
    keep = arrays["mask"].astype(bool) if "mask" in arrays else np.ones(len(rollout), bool)
    keep &= np.isfinite(arrays["q"].astype(float)) & np.isfinite(arrays["p"].astype(float))
    rollout = np.unique(rollout[keep], return_inverse=True)[1].astype(np.int64)
    starts = np.concatenate([[0], np.flatnonzero(np.diff(rollout)) + 1]) if len(rollout) else np.empty(0, int)
    counted = np.arange(len(rollout)) - np.repeat(starts, np.diff(np.append(starts, len(rollout))))

    def column(field: str, kind: type) -> np.ndarray | None:
        return arrays[field][keep].astype(kind) if field in arrays else None

    return Tokens(
        rollout,
        column("position", np.int64) if "position" in arrays and not lists else counted,
        arrays["q"][keep].astype(np.float64),
        arrays["p"][keep].astype(np.float64),
        column("advantage", np.float64),
        column("entropy", np.float64),
        column("token", np.int64),
        column("head_token", np.int64),
        column("head_q", np.float64),
        column("head_p", np.float64),
    )


def _concatenated(parts: Sequence[Tokens]) -> Tokens:
    offset, owners = 0, []
    for part in parts:
        owners.append(part.rollout + offset)
        offset += int(part.rollout.max()) + 1 if len(part.rollout) else 0
    fields = ("position", "q", "p", "advantage", "entropy", "token", "head_token", "head_q", "head_p")
    joined = {
        field: np.concatenate([getattr(part, field) for part in parts])
        if all(getattr(part, field) is not None for part in parts)
        else None
        for field in fields
    }
    return Tokens(np.concatenate(owners), **joined)


@dataclass(frozen=True)
class Regression:
    """Ordinary least squares of the gap on standardised regressors: nats for one standard deviation each, with t."""

    target: str
    coefficients: dict[str, tuple[float, float]]  # regressor: (coefficient, t)
    explained: float  # R²


def regressions(tokens: Tokens) -> list[Regression]:
    """d and |d| on the position in the rollout, the trainer's log-prob and, where it is recorded, the entropy."""
    regressors = {"position": tokens.position.astype(np.float64), "log-prob": (tokens.p + tokens.q) / 2}
    if tokens.entropy is not None:
        regressors["entropy"] = tokens.entropy
    regressors = {name: (x - x.mean()) / x.std() for name, x in regressors.items() if x.std() > 0}
    design = np.column_stack([np.ones(len(tokens.q)), *regressors.values()])
    return [
        _least_squares(name, y, design, list(regressors))
        for name, y in (("d", tokens.gap), ("|d|", np.abs(tokens.gap)))
    ]


def _least_squares(target: str, y: np.ndarray, design: np.ndarray, names: Sequence[str]) -> Regression:
    solution, _, rank, _ = np.linalg.lstsq(design, y, rcond=None)
    residual = y - design @ solution
    freedom = max(len(y) - rank, 1)
    variance = residual @ residual / freedom * np.diag(np.linalg.pinv(design.T @ design))
    total = float(((y - y.mean()) ** 2).sum())
    errors = np.sqrt(np.maximum(variance, 1e-300))
    return Regression(
        target,
        {name: (float(solution[i]), float(solution[i] / errors[i])) for i, name in enumerate(names, 1)},
        1 - float(residual @ residual) / total if total > 0 else 0.0,
    )


def by_bin(values: np.ndarray, gap: np.ndarray, bins: int = BINS) -> list[tuple[float, float]]:
    """K3 in `bins` bins of equal size of `values`: (upper edge, K3) each."""
    k3 = np.exp(gap) - 1 - gap
    parts = np.array_split(np.argsort(values, kind="stable"), bins)
    return [(float(values[part].max()), float(k3[part].mean())) for part in parts if len(part)]


@dataclass(frozen=True)
class DriftShare:
    """Drift beside signal, as gradients to the logits, summed over tokens of one id: what does not average out."""

    drift: float  # |Σ A (q − ρp) over the recorded heads|
    signal: float  # |Σ A (1[y] − p) over the same heads|

    @property
    def share(self) -> float:
        return self.drift / self.signal if self.signal > 0 else float("nan")


def drift_share(tokens: Tokens) -> DriftShare | None:
    """None without advantages and heads of both sides."""
    if tokens.advantage is None or tokens.head_p is None or tokens.head_q is None or tokens.head_token is None:
        return None
    q, p = np.exp(tokens.head_q), np.exp(tokens.head_p)
    rho = np.maximum(1 - q.sum(1), 1e-6) / np.maximum(1 - p.sum(1), 1e-6)
    weight = tokens.advantage[:, None]
    hit = tokens.head_token == tokens.token[:, None] if tokens.token is not None else np.zeros_like(q, bool)
    ids = np.unique(tokens.head_token, return_inverse=True)[1].reshape(-1)
    drift = np.bincount(ids, (weight * (q - rho[:, None] * p)).reshape(-1))
    signal = np.bincount(ids, (weight * (hit - p)).reshape(-1))
    return DriftShare(float(np.linalg.norm(drift)), float(np.linalg.norm(signal)))


def token_signatures(tokens: Tokens) -> list[Signature]:
    """Bugs that the tokens show. Needs some hundred of them."""
    if len(tokens.q) < 100:
        return []
    tests = (_shift, _misaligned, _truncated, _temperature, _another)
    found = [signature for test in tests if (signature := test(tokens)) is not None]
    return sorted(found, key=lambda signature: -signature.confidence)


def shift_correlations(tokens: Tokens) -> dict[int, float]:
    """Correlation of log p at a position with log q `shift` positions later in the same rollout."""
    index = np.arange(len(tokens.q))
    result = {}
    for shift in range(-MAX_SHIFT, MAX_SHIFT + 1):
        other = index + shift
        inside = (other >= 0) & (other < len(tokens.q))
        inside[inside] &= tokens.rollout[index[inside]] == tokens.rollout[other[inside]]
        a, b = tokens.p[index[inside]], tokens.q[other[inside]]
        if len(a) > 2 and a.std() > 0 and b.std() > 0:
            result[shift] = float(np.corrcoef(a, b)[0, 1])
    return result


def _shift(tokens: Tokens) -> Signature | None:
    found = shift_correlations(tokens)
    if not found:
        return None
    best = max(found, key=lambda shift: found[shift])
    if best == 0 or found[best] < found.get(0, 0.0) + 0.2:
        return None
    return Signature(
        "shifted log-probs",
        f"log p fits the sampler's log-prob {abs(best)} position{'s' if abs(best) > 1 else ''} "
        f"{'later' if best > 0 else 'earlier'} (correlation {found[best]:.2f}), not its own ({found.get(0, 0.0):.2f})",
        "A mask, or the slice of logits against labels, is off by that many positions.",
        0.98,
    )


def _misaligned(tokens: Tokens) -> Signature | None:
    """Re-tokenised: in some rollouts the recorded log-probs are not those of the tokens, in the others they are."""
    size = np.abs(tokens.gap)
    count = np.maximum(np.bincount(tokens.rollout), 1)
    mean = np.bincount(tokens.rollout, size) / count
    bad = mean > max(20 * float(np.median(mean)), 0.3)
    if not 0.01 <= bad.mean() <= 0.6 or bad.sum() < 2:
        return None
    ratio = float(np.exp(tokens.gap[bad[tokens.rollout]]).mean())
    if ratio < 3:  # an engine that is merely wrong there draws from its own q: mean r is 1 or, by missed rarities, less
        return None
    return Signature(
        "re-tokenised responses",
        f"{bad.mean():.0%} of the rollouts have a mean |d| of {mean[bad].mean():.2g} and a mean p/q of {ratio:.2g}, "
        f"the others a mean |d| of {mean[~bad].mean():.1g}",
        "Compare the token ids that were sampled with those that are trained on: text was decoded and encoded again, "
        "or a chat template added or dropped a token. Hand token ids through.",
        0.85,
    )


def _truncated(tokens: Tokens) -> Signature | None:
    gap = tokens.gap
    if np.mean(gap < 0) < 0.97 or np.median(gap) > -1e-4 or -gap.mean() > 0.7:
        return None
    return Signature(
        "top-p or top-k",
        f"log p < log q for {np.mean(gap < 0):.1%} of the tokens, and mean p/q is {np.exp(gap).mean():.3g}: the mass "
        "that the sampler keeps",
        "The sampler truncates (top-p, top-k, min-p) and renormalises; the trainer does not.",
        0.95,
    )


def _temperature(tokens: Tokens) -> Signature | None:
    """Within a position log q = log p / T + const, so heads give T exactly; one token a position gives a direction."""
    if tokens.head_q is not None and tokens.head_p is not None:
        x = tokens.head_p - tokens.head_p.mean(1, keepdims=True)
        y = tokens.head_q - tokens.head_q.mean(1, keepdims=True)
        slope = float((x * y).sum() / (x * x).sum())
        fit = float((x * y).sum() / np.sqrt((x * x).sum() * (y * y).sum()))
        if fit > 0.98 and abs(slope - 1) > 0.05:
            return Signature(
                "temperature",
                f"within a position the two sides' log-probs are proportional by {slope:.2f}: temperatures differ by a "
                f"factor of {1 / slope:.2f}",
                "Divide the trainer's logits by the sampling temperature.",
                0.97,
            )
        return None
    if tokens.q.std() == 0 or tokens.p.std() == 0:
        return None
    fit = float(np.corrcoef(tokens.p, tokens.q)[0, 1])
    slope = float(tokens.p.std() / tokens.q.std())
    if fit < 0.95 or abs(np.log(slope)) < 0.1:
        return None
    return Signature(
        "temperature",
        f"log p and log q correlate by {fit:.3f} with a slope of {slope:.2f}: the sampler is "
        f"{'sharper' if slope < 1 else 'flatter'} than the trainer, position by position",
        "Divide the trainer's logits by the sampling temperature, and record log-probs after it.",
        0.85,
    )


def _another(tokens: Tokens) -> Signature | None:
    """mean r = 1; its error by rollouts, whose tokens share prefixes."""
    excess = np.exp(tokens.gap) - 1
    count = np.maximum(np.bincount(tokens.rollout), 1)
    sums = np.bincount(tokens.rollout, excess)
    if len(sums) < 8:
        return None
    mean = float(excess.mean())
    error = float(np.sqrt(len(sums)) * np.std(sums - mean * count, ddof=1) / count.sum())
    k1 = float(-tokens.gap.mean())
    k1_error = float(
        np.sqrt(len(sums)) * np.std(np.bincount(tokens.rollout, -tokens.gap) - k1 * count, ddof=1) / count.sum()
    )
    if (mean > 0.02 and mean > 5 * error) or (k1 < -5 * k1_error and k1 < -3e-3):
        return Signature(
            "log-probs of another distribution",
            f"mean p/q is {1 + mean:.3g} ± {error:.2g} and K1 {k1:.2g} ± {k1_error:.1g}; they are 1 and not negative "
            "for tokens that were drawn from the recorded log-probs",
            "Record the log-probs of the call that samples, after temperature, with the weights that sample.",
            0.9,
        )
    return None
