"""Quantisation or fault? What the precision gate's checks see of a cache that is damaged at a known rate.

Quantising a cache is a function of what is written, so the same seeds give the same tokens. A fault that comes and goes
gives other tokens, unless it hits nothing that is read; one that always hits the same entries looks like rounding.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from score_centering.precision.registry import Precision
from score_centering.rollout import Engine, Rollout, Sampling
from score_centering.rollout.local.cache_faults import CacheFaults
from score_centering.settings import UserError
from score_centering.settings.stages import FaultCheckStage, ValidationStage
from score_centering.settings.studies import NO_FAULT
from score_centering.validation import gaps, trainer_forward
from score_centering.validation.gate import failures
from score_centering.validation.measure import Subject
from score_centering.validation.repeatability import compare_repeats
from score_centering.validation.stage import FORWARD_ROLLOUTS, engine_of, read_subject

GAPS = ("k3_kl", "abs_logprob_gap_mean", "abs_logprob_gap_max")


def check_faults(
    stage: FaultCheckStage, dataset_manifest: Path, model_manifest: Path, quantised_configs: Sequence[Path]
) -> Iterator[dict[str, Any]]:
    """Rows of figures.faults.CHECK: the healthy engine, then each kind and rate, transient and persistent.

    Raises:
        UserError: the rollouts are another engine's than the local one, whose cache alone can be damaged.
    """
    validation = stage.validation
    if validation.engine != "local":
        raise UserError(
            f"actor_rollout_ref.rollout.name = {validation.engine!r}: faults damage the cache of the local engine only"
        )
    subject, places = read_subject(validation, dataset_manifest, model_manifest, quantised_configs)
    precision = Precision(stage.precision.quantization, stage.precision.kv_cache_dtype)
    checkpoint = subject.quantised.get(precision.quantization or "")
    damages = [(kind, rate, transient) for kind in stage.kinds for rate in stage.rates for transient in (True, False)]
    for kind, rate, transient in [(NO_FAULT, 0.0, False), *damages]:
        faults = CacheFaults(rate, kind, transient, validation.precision.seed) if rate else None
        engine = engine_of(validation, precision, subject, places, faults=faults)
        engine.sync(subject.base if checkpoint is None else checkpoint.weights, 0)
        numbers, refusal = _numbers(engine, subject, validation)
        engine.close()
        prefixed = {f"{precision.name}.{name}": value for name, value in numbers.items()}
        limits = {name: limit.model_dump() for name, limit in stage.limits.items()}
        failed = [line.split(" ")[0].removeprefix(f"{precision.name}.") for line in failures(prefixed, limits)]
        yield {
            "kind": kind,
            "rate": rate,
            "transient": transient,
            **{name.removeprefix("repeat."): value for name, value in numbers.items()},
            "refusal": refusal,
            "seen_by_repeat": any(name.startswith("repeat.") for name in failed) if not refusal else None,
            "seen_by_gap": any(not name.startswith("repeat.") for name in failed) if not refusal else None,
        }


def _numbers(engine: Engine, subject: Subject, validation: ValidationStage) -> tuple[dict[str, float], str | None]:
    """The repeatability check, and the gap to the trainer; or the line with which the engine refuses to go on."""
    sampling = Sampling(validation.temperature, validation.max_response_length, False, subject.stop_token_ids)

    def generate() -> list[Rollout]:
        rollouts = validation.precision.rollouts
        return engine.generate(subject.prompts, rollouts, sampling, validation.precision.seed, 1)

    try:
        first, second = generate(), generate()
    except UserError as error:
        return {}, str(error)
    device = validation.runtime.device
    scores = trainer_forward.score(subject.model, first, validation.temperature, FORWARD_ROLLOUTS, device)
    gap = gaps.sampled_gaps(scores.log_p, scores.log_q)
    repeats = compare_repeats(first, second)
    return {f"repeat.{name}": value for name, value in repeats.items()} | {name: gap[name] for name in GAPS}, None
