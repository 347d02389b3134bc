"""The whole precision validation: rollouts in each precision, held against the trainer's BF16 forward.

`numbers` of the result is flat, `<precision>.<name>` of rollouts, `<format>.<name>` of a quantised checkpoint and
`task.<name>` of the held-out problems: what limits refer to. `layers` has the
detail. The documentation of precision defines every name.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from score_centering.precision import requantise
from score_centering.precision.registry import FORMATS, UNQUANTISED_PRECISION, Precision, cache_format_of, format_of
from score_centering.precision.requantising import Listed
from score_centering.reward import final_answer
from score_centering.rollout import Engine, Rollout, Sampling, mean_response_length, sampled_entropy, validate_all
from score_centering.settings.stages import REPEAT_LIMITS
from score_centering.validation import drift, gaps, layers, quantised_checkpoint, trainer_forward
from score_centering.validation.repeatability import compare_repeats, poison_freed_memory

SCHEMA_VERSION = 2
UNCHANGED = ("mismatched_codes", "mismatched_scales", "changed_unlisted_tensors")
ALL_PARAMETERS_LIMIT = 20_000_000
DETAIL_TOKENS = 4096  # of the run by layer, which keeps every listed layer's output

# Rollouts → the texts of their responses, and whether each begins inside the thinking.
Read = Callable[[Sequence[Rollout]], tuple[Sequence[str], Sequence[bool]]]


@dataclass(frozen=True)
class Quantised:
    """A quantised checkpoint of the model under test."""

    weights: Mapping[str, Tensor]
    listed: Listed


NOT_QUANTISED = Quantised({}, {})


@dataclass(frozen=True)
class Subject:
    """The model under test and what it is asked."""

    model: nn.Module  # the trainer's, in BF16
    base: Mapping[str, Tensor]  # its weights, checkpoint format
    quantised: Mapping[str, Quantised]  # its checkpoints, by number format
    prompts: Sequence[Sequence[int]]  # token ids
    stop_token_ids: tuple[int, ...]
    read: Read
    answerable_share: float  # of all held-out problems


@dataclass(frozen=True)
class Plan:
    """How much is measured."""

    rollouts: int  # a prompt
    max_tokens: int
    temperature: float
    seed: int
    head_sizes: Sequence[int]  # every K, none above the vocabulary
    drift_tokens: int  # positions at which the whole vocabulary is recorded, at least, if there are so many
    batch_size: int  # rollouts a forward
    device: str
    precisions: Sequence[Precision]  # unquantised first


def measure(
    subject: Subject,
    plan: Plan,
    make_engine: Callable[[Precision], Engine],
    poison: Callable[[str], None] = poison_freed_memory,
) -> dict[str, Any]:
    """Numbers and per-layer detail of every precision of the plan.

    Args:
        make_engine: precision → a fresh engine, to be synced here.
        poison: fills freed memory with NaN before each of the two generations that must be equal.
    """
    numbers: dict[str, float] = {"task.answerable_share": subject.answerable_share}
    notes: list[str] = []
    detail: dict[str, Any] = {"weights": {}}
    limits: dict[str, dict[str, float]] = {}
    for name, checkpoint in subject.quantised.items():
        found = layers.weight_errors(subject.base, checkpoint.weights, checkpoint.listed)
        detail["weights"][name] = found
        fresh = requantise(subject.base, checkpoint.listed)
        linears = _linear_layers(subject.model)
        measured = quantised_checkpoint.checkpoint_numbers(
            subject.base, checkpoint.weights, fresh, checkpoint.listed, linears
        )
        numbers |= {f"{name}.{key}": value for key, value in measured.items()} | _largest(found, f"{name}.weights")
        low, high = format_of(name).weight_error
        limits |= {
            f"{name}.weights.relative": {"min": low, "max": high},
            **{f"{name}.checkpoint.{key}": {"max": 0} for key in UNCHANGED},
        }
    inputs: Sequence[Rollout] = ()
    bf16_greedy: Sequence[Rollout] = ()
    for precision in plan.precisions:
        engine, name = make_engine(precision), precision.name
        try:
            checkpoint = subject.quantised.get(precision.quantization or "")
            engine.sync(subject.base if checkpoint is None else checkpoint.weights, 0)
            sampled, repeated, dense, greedy = _generate(engine, subject, plan, poison)
        finally:
            engine.close()
        if precision == UNQUANTISED_PRECISION:
            inputs, bf16_greedy = dense, greedy
        else:
            detail[name] = _activation_detail(subject, plan, precision, inputs)
            numbers |= _largest(detail[name]["layers"], f"{name}.activations")
            numbers |= _largest(detail[name].get("kv", {}), f"{name}.kv")
            agreement = greedy_agreement(subject.read, bf16_greedy, greedy)
            numbers |= {f"{name}.{key}": value for key, value in agreement.items()}
        for key, value in {
            **_distance(subject, plan, precision, sampled),
            **_drift(subject, plan, dense, notes),
            **{f"repeat.{each}": value for each, value in compare_repeats(sampled, repeated).items()},
            "entropy": sampled_entropy(sampled),
            "response_length_mean": mean_response_length(sampled),
            "positions": sum(len(r.token_ids) for r in sampled),
            "drift_positions": sum(len(r.token_ids) for r in dense),
        }.items():
            numbers[f"{name}.{key}"] = value
        limits |= {f"{name}.{key}": limit for key, limit in REPEAT_LIMITS.items()}
    return {
        "schema_version": SCHEMA_VERSION,
        "vocab_size": subject.model.lm_head.weight.shape[0],
        "head_sizes": list(plan.head_sizes),
        "precisions": {precision.name: precision.label for precision in plan.precisions},
        "formats": {name: FORMATS[name].label for name in subject.quantised},
        "limits": limits,
        "notes": sorted(set(notes)),
        "numbers": numbers,
        "layers": detail,
    }


def greedy_agreement(read: Read, reference: Sequence[Rollout], other: Sequence[Rollout]) -> dict[str, float]:
    """Do greedy responses give the same boxed answer and the same tokens as the BF16 engine's?

    `greedy_answer_agreement` is the share among the prompts that BF16 answered, `greedy_answered_share` how many of
    all prompts those are; without any, there is nothing to agree on and the agreement is 0.
    """
    answers = [list(map(final_answer, *read(rollouts))) for rollouts in (reference, other)]
    pairs = list(zip(*answers, strict=True))
    answered = [a == b for a, b in pairs if a is not None]
    same = [np.array_equal(a.token_ids, b.token_ids) for a, b in zip(reference, other, strict=True)]
    return {
        "greedy_answer_agreement": sum(answered) / max(1, len(answered)),
        "greedy_answered_share": len(answered) / len(pairs),
        "greedy_response_agreement": sum(same) / len(same),
    }


def _generate(
    engine: Engine, subject: Subject, plan: Plan, poison: Callable[[str], None]
) -> tuple[list[Rollout], list[Rollout], list[Rollout], list[Rollout]]:
    """Sampled rollouts, the same again, those of the first prompts with the whole vocabulary, and greedy ones."""
    vocab_size = subject.model.lm_head.weight.shape[0]
    sampling = Sampling(plan.temperature, plan.max_tokens, False, subject.stop_token_ids)
    greedy = Sampling(plan.temperature, plan.max_tokens, True, subject.stop_token_ids)
    capture = max(plan.head_sizes)
    poison(plan.device)
    sampled = engine.generate(subject.prompts, plan.rollouts, sampling, plan.seed, capture)
    poison(plan.device)
    repeated = engine.generate(subject.prompts, plan.rollouts, sampling, plan.seed, capture)
    # No response is recorded for longer than the drift needs: a whole vocabulary a position is large.
    first = replace(sampling, max_tokens=min(plan.max_tokens, plan.drift_tokens))
    ends = np.cumsum([min(len(r.token_ids), first.max_tokens) for r in sampled])[plan.rollouts - 1 :: plan.rollouts]
    prompts = min(len(subject.prompts), int(np.searchsorted(ends, plan.drift_tokens)) + 1)
    dense = engine.generate(subject.prompts[:prompts], plan.rollouts, first, plan.seed, vocab_size)
    validate_all(sampled, vocab_size)
    validate_all(dense, vocab_size)
    return sampled, repeated, dense, engine.generate(subject.prompts, 1, greedy, plan.seed, 0)


def _distance(subject: Subject, plan: Plan, precision: Precision, sampled: Sequence[Rollout]) -> dict[str, float]:
    """The gap to the trainer, head masses, and the gap between the engine and the emulation of its formats."""
    scores = trainer_forward.score(subject.model, sampled, plan.temperature, plan.batch_size, plan.device)
    numbers = gaps.sampled_gaps(scores.log_p, scores.log_q)
    numbers |= gaps.head_masses(scores.candidate_log_q, scores.candidate_log_p, list(plan.head_sizes))
    numbers["top1_agreement"] = scores.top1_agrees.double().mean().item()
    if precision != UNQUANTISED_PRECISION:
        checkpoint = subject.quantised.get(precision.quantization or "", NOT_QUANTISED)
        with emulation(subject.model, checkpoint, precision):
            emulated = trainer_forward.score(subject.model, sampled, plan.temperature, plan.batch_size, plan.device)
        gap = gaps.sampled_gaps(emulated.log_p, emulated.log_q)
        numbers |= {f"emulation.{name}": gap[name] for name in ("abs_logprob_gap_mean", "abs_logprob_gap_p95")}
    return numbers


def _drift(subject: Subject, plan: Plan, dense: Sequence[Rollout], notes: list[str]) -> dict[str, float]:
    """The exact drift in the LM head, the final hidden state and, for a small model, all parameters."""
    model = subject.model
    weight = model.lm_head.weight
    parameters = list(model.parameters())
    with_parameters = sum(p.numel() for p in parameters) <= ALL_PARAMETERS_LIMIT
    if not with_parameters:
        notes.append(f"the drift in all parameters is measured up to {ALL_PARAMETERS_LIMIT} parameters only")
    log_q = trainer_forward.dense_log_q(dense, weight.shape[0]).to(plan.device)
    log_p, hidden = [], []
    with torch.no_grad():
        for batch in trainer_forward.batches(dense, plan.batch_size, plan.device):
            hidden.append(trainer_forward.hidden_states(model, batch))
            log_p.append(trainer_forward.log_probs(hidden[-1], weight, plan.temperature))
    numbers = gaps.dense_gaps(torch.cat(log_p), log_q)
    del numbers["top1_agreement"]  # measured on all sampled rollouts
    numbers |= drift.drift_norms(
        torch.cat(log_p), log_q, torch.cat(hidden), weight.detach(), plan.head_sizes, plan.temperature
    )
    if with_parameters:

        def pairs():
            start = 0
            for batch in trainer_forward.batches(dense, plan.batch_size, plan.device):
                p = trainer_forward.log_probs(trainer_forward.hidden_states(model, batch), weight, plan.temperature)
                yield p, log_q[start : start + len(p)]
                start += len(p)

        numbers |= drift.parameter_drift_norms(pairs(), parameters, plan.head_sizes)
    return numbers


@torch.no_grad()
def _activation_detail(subject: Subject, plan: Plan, precision: Precision, inputs: Sequence[Rollout]) -> dict[str, Any]:
    """Errors by layer of the emulated precision against BF16, both run on the first of `inputs`."""
    batch = next(trainer_forward.batches(inputs, plan.batch_size, plan.device, DETAIL_TOKENS))
    checkpoint = subject.quantised.get(precision.quantization or "", NOT_QUANTISED)
    stored = layers.stored_parts(checkpoint.weights, checkpoint.listed)
    with layers.recorded_outputs(subject.model, list(checkpoint.listed)) as reference:
        trainer_forward.hidden_states(subject.model, batch)
    with ExitStack() as stack:
        kv = stack.enter_context(_cache(subject.model, precision, batch.mask))
        linear = stack.enter_context(
            layers.quantised_layers(subject.model, stored, checkpoint.listed, reference, batch.mask)
        )
        trainer_forward.hidden_states(subject.model, batch)
    detail = {
        "layers": {
            name: {**e.input.numbers("input"), **e.local.numbers("local"), **e.output.numbers("output")}
            for name, e in linear.items()
        }
    }
    if kv:
        detail["kv"] = {name: {**e.key.numbers("key"), **e.value.numbers("value")} for name, e in kv.items()}
    return detail


@contextmanager
def emulation(model: nn.Module, checkpoint: Quantised, precision: Precision) -> Iterator[None]:
    """Let `model` compute as a rollout engine of `precision` does, with the bytes of `checkpoint`."""
    stored = layers.stored_parts(checkpoint.weights, checkpoint.listed)
    with layers.quantised_layers(model, stored, checkpoint.listed), _cache(model, precision):
        yield


def _cache(
    model: nn.Module, precision: Precision, mask: Tensor | None = None
) -> AbstractContextManager[dict[str, layers.KvErrors]]:
    if precision.kv_cache_dtype == UNQUANTISED_PRECISION.kv_cache_dtype:
        return nullcontext({})
    return layers.quantised_cache(model, cache_format_of(precision.kv_cache_dtype), mask)


def _largest(detail: Mapping[str, Mapping[str, float]], prefix: str) -> dict[str, float]:
    """`<prefix>.<name>`: each relative error's largest value over the layers (absolute ones don't compare)."""
    rows = list(detail.values())
    names = [name for name in rows[0] if name.endswith("_relative") or name == "weight_channel_max"] if rows else []
    return {f"{prefix}.{name.removeprefix('weight_')}": max(row[name] for row in rows) for name in names}


def _linear_layers(model: nn.Module) -> list[str]:
    head = model.get_output_embeddings()
    return [name for name, module in model.named_modules() if isinstance(module, nn.Linear) and module is not head]
