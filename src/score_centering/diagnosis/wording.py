"""A diagnosis for people and for programs."""

from dataclasses import asdict, replace
from typing import Any

from score_centering.diagnosis.changes import changes
from score_centering.diagnosis.corrections import effects
from score_centering.diagnosis.readers import Log
from score_centering.diagnosis.tokens import Tokens, by_bin, drift_share, regressions, token_signatures
from score_centering.diagnosis.verdicts import Diagnosis


def with_tokens(diagnosis: Diagnosis, tokens: Tokens) -> Diagnosis:
    """What the tokens add: a bug that they show outranks what the log says."""
    found = token_signatures(tokens)
    if not found:
        return diagnosis
    best = found[0]
    return replace(
        diagnosis,
        verdict="bug",
        confidence=max(best.confidence, diagnosis.confidence if diagnosis.verdict == "bug" else 0.0),
        evidence=[*(f"{bug.cause} (rollouts): {bug.evidence}" for bug in found), *diagnosis.evidence],
        advice=list(dict.fromkeys([best.advice, *(diagnosis.advice if diagnosis.verdict == "bug" else [])])),
    )


def as_json(log: Log, diagnosis: Diagnosis, tokens: Tokens | None = None) -> dict[str, Any]:
    """One object: `verdict`, `confidence`, `evidence`, `advice`, and what they were made from."""
    result: dict[str, Any] = {
        "verdict": diagnosis.verdict,
        "confidence": round(diagnosis.confidence, 3),
        "evidence": diagnosis.evidence,
        "advice": diagnosis.advice,
        "measures": {name: float(f"{value:.6g}") for name, value in diagnosis.measures.items()},
        "changes": [asdict(change) for change in changes(log)],
        "log": log.name,
        "framework": log.framework,
        "columns": {quantity: choice.column for quantity, choice in log.choices.items()},
    }
    if tokens is not None:
        share = drift_share(tokens)
        result["rollouts"] = {
            "tokens": len(tokens.q),
            "rollouts": int(tokens.rollout.max()) + 1,
            "corrections": [asdict(effect) for effect in effects(tokens)],
            "regressions": [asdict(regression) for regression in regressions(tokens)],
            "k3_by_position": by_bin(tokens.position, tokens.gap),
            "k3_by_logprob": by_bin(tokens.p, tokens.gap),
            "k3_by_entropy": None if tokens.entropy is None else by_bin(tokens.entropy, tokens.gap),
            "drift_share": None if share is None else share.share,
        }
    return result


def as_text(log: Log, diagnosis: Diagnosis, tokens: Tokens | None = None) -> str:
    """A verdict, its reasons, what to do, and which columns they were read from."""
    columns = ", ".join(f"{quantity}={choice.column}" for quantity, choice in log.choices.items())
    lines = [
        log.name,
        f"  verdict  {diagnosis.verdict} (confidence {diagnosis.confidence:.2f})",
        *(f"  because  {line}" for line in diagnosis.evidence),
        *(f"  next     {line}" for line in diagnosis.advice),
        f"  columns  {log.framework}: {columns}",
        f"           {len(log.unused)} others not used; --column QUANTITY=NAME overrides",
    ]
    return "\n".join(lines + (_token_lines(tokens) if tokens is not None else []))


def _token_lines(tokens: Tokens) -> list[str]:
    lines = [
        f"  rollouts {len(tokens.q)} tokens of {int(tokens.rollout.max()) + 1} rollouts",
        f"           {'correction':<10} {'bounds':<30} {'masked':>7} {'bounded':>8} {'rollouts':>9} {'effective':>10}",
    ]
    lines += [
        f"           {effect.correction:<10} {effect.bounds:<30} {effect.masked:>7.2%} {effect.bounded:>8.2%} "
        f"{effect.masked_rollouts:>9.2%} {effect.effective:>10.3f}"
        for effect in effects(tokens)
    ]
    for regression in regressions(tokens):
        terms = ", ".join(f"{name} {value:+.2g} (t {t:.1f})" for name, (value, t) in regression.coefficients.items())
        lines.append(f"           {regression.target} on {terms}; R² {regression.explained:.2f}")
    bins = {"position": tokens.position, "log p": tokens.p, "entropy": tokens.entropy}
    for name, values in bins.items():
        if values is not None:
            shown = ", ".join(f"{k3:.2g} up to {edge:.3g}" for edge, k3 in by_bin(values, tokens.gap))
            lines.append(f"           K3 by {name}: {shown}")
    share = drift_share(tokens)
    if share is not None:
        lines.append(f"           drift over signal, at the logits: {share.share:.2g}")
    return lines
