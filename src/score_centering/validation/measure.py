"""The whole precision validation: rollouts in each precision, held against the trainer's BF16 forward.

`numbers` of the result is flat, `<precision>.<name>` or `<topic>.<name>`: what limits refer to. `layers` has the
detail. The documentation of precision defines every name.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from score_centering.precision import requantise
from score_centering.reward import final_answer
from score_centering.rollout import Engine, Rollout, Sampling, validate_all
from score_centering.validation import drift, gaps, layers, trainer_forward, w8a8_checkpoint
from score_centering.validation.repeatability import compare_repeats, poison_freed_memory

SCHEMA_VERSION = 1
BF16, INT8, INT8_INT4KV = PRECISIONS = ("bf16", "int8", "int8_int4kv")
ALL_PARAMETERS_LIMIT = 20_000_000


@dataclass(frozen=True)
class Subject:
    """The model under test and what it is asked."""

    model: nn.Module  # the trainer's, in BF16
    base: Mapping[str, Tensor]  # its weights, checkpoint format
    w8a8: Mapping[str, Tensor]  # the W8A8 checkpoint's
    listed: Sequence[str]  # its quantised layers
    prompts: Sequence[Sequence[int]]  # token ids
    stop_token_ids: tuple[int, ...]
    decode: Callable[[Sequence[int]], str]


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
    precisions: Sequence[str] = PRECISIONS  # BF16 first


def measure(
    subject: Subject,
    plan: Plan,
    make_engine: Callable[[str], Engine],
    poison: Callable[[str], None] = poison_freed_memory,
) -> dict[str, Any]:
    """Numbers and per-layer detail of every precision of the plan.

    Args:
        make_engine: precision → a fresh engine, to be synced here.
        poison: fills freed memory with NaN before each of the two generations that must be equal.
    """
    numbers: dict[str, float] = {}
    notes: list[str] = []
    detail: dict[str, Any] = {"weights": layers.weight_errors(subject.base, subject.w8a8, subject.listed)}
    numbers |= w8a8_checkpoint.checkpoint_numbers(
        subject.w8a8, requantise(subject.base, subject.listed), subject.listed, _linear_layers(subject.model)
    )
    numbers |= _largest(detail["weights"], "weights")
    inputs: Sequence[Rollout] = ()
    bf16_greedy: Sequence[Rollout] = ()
    for precision in plan.precisions:
        engine = make_engine(precision)
        try:
            engine.sync(subject.base if precision == BF16 else subject.w8a8, 0)
            sampled, repeated, dense, greedy = _generate(engine, subject, plan, poison)
        finally:
            engine.close()
        if precision == BF16:
            inputs, bf16_greedy = dense, greedy
        else:
            detail[precision] = _activation_detail(subject, plan, precision, inputs)
            numbers |= _largest(detail[precision]["layers"], f"{precision}.activations")
            numbers |= _largest(detail[precision].get("kv", {}), f"{precision}.kv")
            agreement = greedy_agreement(subject.decode, bf16_greedy, greedy)
            numbers |= {f"{precision}.{name}": value for name, value in agreement.items()}
        for name, value in {
            **_distance(subject, plan, precision, sampled),
            **_drift(subject, plan, dense, notes),
            **{f"repeat.{key}": value for key, value in compare_repeats(sampled, repeated).items()},
            "positions": sum(len(r.token_ids) for r in sampled),
            "drift_positions": sum(len(r.token_ids) for r in dense),
        }.items():
            numbers[f"{precision}.{name}"] = value
    return {
        "schema_version": SCHEMA_VERSION,
        "vocab_size": subject.model.lm_head.weight.shape[0],
        "head_sizes": list(plan.head_sizes),
        "notes": sorted(set(notes)),
        "numbers": numbers,
        "layers": detail,
    }


def greedy_agreement(
    decode: Callable[[Sequence[int]], str], reference: Sequence[Rollout], other: Sequence[Rollout]
) -> dict[str, float]:
    """Do greedy responses give the same boxed answer and the same tokens as the BF16 engine's?

    `greedy_answer_agreement` is the share among the prompts that BF16 answered, `greedy_answered_share` how many of
    all prompts those are; without any, there is nothing to agree on and the agreement is 0.
    """
    pairs = [
        (final_answer(decode(a.token_ids.tolist())), final_answer(decode(b.token_ids.tolist())))
        for a, b in zip(reference, other, strict=True)
    ]
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


def _distance(subject: Subject, plan: Plan, precision: str, sampled: Sequence[Rollout]) -> dict[str, float]:
    """The gap to the trainer, head masses, and the gap between the engine and the emulation of its formats."""
    scores = trainer_forward.score(subject.model, sampled, plan.temperature, plan.batch_size, plan.device)
    numbers = gaps.sampled_gaps(scores.log_p, scores.log_q)
    numbers |= gaps.head_masses(scores.candidate_log_q, scores.candidate_log_p, list(plan.head_sizes))
    numbers["top1_agreement"] = scores.top1_agrees.double().mean().item()
    if precision != BF16:
        with emulation(subject.model, subject.w8a8, subject.listed, precision):
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
def _activation_detail(subject: Subject, plan: Plan, precision: str, inputs: Sequence[Rollout]) -> dict[str, Any]:
    """Errors by layer of the emulated precision against BF16, both run on the prompts and responses of `inputs`."""
    batch = trainer_forward.collate(inputs[: plan.batch_size], plan.device)
    with layers.recorded_outputs(subject.model, subject.listed) as reference:
        trainer_forward.hidden_states(subject.model, batch)
    with ExitStack() as stack:
        kv = stack.enter_context(layers.int4_cache(subject.model, batch.mask)) if precision == INT8_INT4KV else {}
        linear = stack.enter_context(
            layers.int8_layers(subject.model, subject.w8a8, subject.listed, reference, batch.mask)
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
def emulation(model: nn.Module, w8a8: Mapping[str, Tensor], listed: Sequence[str], precision: str) -> Iterator[None]:
    """Let `model` compute as a rollout engine of `precision` does."""
    with ExitStack() as stack:
        if precision != BF16:
            stack.enter_context(layers.int8_layers(model, w8a8, listed))
        if precision == INT8_INT4KV:
            stack.enter_context(layers.int4_cache(model))
        yield


def _largest(detail: Mapping[str, Mapping[str, float]], prefix: str) -> dict[str, float]:
    """`<prefix>.<name>`: each relative error's largest value over the layers (absolute ones don't compare)."""
    rows = list(detail.values())
    names = [name for name in rows[0] if name.endswith("_relative") or name == "weight_channel_max"] if rows else []
    return {f"{prefix}.{name.removeprefix('weight_')}": max(row[name] for row in rows) for name in names}


def _linear_layers(model: nn.Module) -> list[str]:
    head = model.get_output_embeddings()
    return [name for name, module in model.named_modules() if isinstance(module, nn.Linear) and module is not head]
