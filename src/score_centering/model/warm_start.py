"""A short supervised warm start, until the sampled reward is high enough to learn from and low enough to improve."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from score_centering.settings import UserError
from score_centering.settings.model_blocks import WarmStart

LR_WARMUP_STEPS = 20


@dataclass(frozen=True)
class Example:
    """One worked problem: `prompt` and `response` token ids; the response ends with the stop token."""

    prompt: tuple[int, ...]
    response: tuple[int, ...]


@dataclass(frozen=True)
class Sampled:
    """What rollouts at T = 1 showed: mean reward, entropy in nats a token (mean −log q of the sampled tokens, an
    unbiased estimate) and mean response length in tokens."""

    reward: float
    entropy: float
    response_length: float


@dataclass(frozen=True)
class WarmStartResult:
    """steps taken, what was sampled at the end, and the (step, loss, reward) of each measurement."""

    steps: int
    sampled: Sampled
    measured: list[tuple[int, float, float]]


def warm_start(
    model: PreTrainedModel,
    examples: Sequence[Example],
    options: WarmStart,
    sample: Callable[[], Sampled],
    report: Callable[[int, float, float], None],
) -> WarmStartResult:
    """Train `model` in place on the worked `examples` until the reward of `sample()` reaches `options.reward_target`.

    Cross entropy on response tokens (mean over the batch's tokens), AdamW, gradient norm at most 1.

    Args:
        sample: rollouts of `model` as it stands, at T = 1.
        report: called with (step, loss, reward) at each measurement.

    Raises:
        UserError: the reward ends outside [reward_min, reward_max].
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate, weight_decay=0.0)
    batches = _batches(len(examples), options.batch_size, options.seed)
    measured: list[tuple[int, float, float]] = []
    for step in range(1, options.max_steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = options.learning_rate * min(1.0, step / LR_WARMUP_STEPS)
        loss = _step(model, optimizer, [examples[i] for i in next(batches)], options.micro_batch_size)
        if step % options.check_every == 0 or step == options.max_steps:
            sampled = sample()
            measured.append((step, loss, sampled.reward))
            report(step, loss, sampled.reward)
            if sampled.reward >= options.reward_target:
                break
    step, _, reward = measured[-1]
    if not options.reward_min <= reward <= options.reward_max:
        raise UserError(
            f"model.warm_start: sampled reward {reward:.3f} after {step} steps lies outside "
            f"[{options.reward_min}, {options.reward_max}]: change max_steps, learning_rate or check_every"
        )
    return WarmStartResult(step, sampled, measured)


def _step(
    model: PreTrainedModel, optimizer: torch.optim.Optimizer, examples: Sequence[Example], micro_batch_size: int | None
) -> float:
    size = micro_batch_size or len(examples)
    tokens = sum(len(example.response) for example in examples)
    total = 0.0
    optimizer.zero_grad(set_to_none=True)
    for start in range(0, len(examples), size):
        input_ids, labels = _collate(examples[start : start + size], model.device)
        logits = model(input_ids=input_ids, use_cache=False).logits
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten(), reduction="sum") / tokens
        loss.backward()
        total += loss.item()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return total


def _collate(examples: Sequence[Example], device: torch.device) -> tuple[Tensor, Tensor]:
    """input_ids, labels (B, S) int64, padded on the right; labels are −100 outside the response."""
    length = max(len(example.prompt) + len(example.response) for example in examples)
    input_ids = torch.zeros(len(examples), length, dtype=torch.int64)
    labels = torch.full((len(examples), length), -100, dtype=torch.int64)
    for row, example in enumerate(examples):
        start, end = len(example.prompt), len(example.prompt) + len(example.response)
        input_ids[row, :end] = torch.tensor(example.prompt + example.response)
        labels[row, start:end] = torch.tensor(example.response)
    return input_ids.to(device), labels.to(device)


def _batches(count: int, size: int, seed: int) -> Iterator[np.ndarray]:
    """Indices of one batch after another: each epoch is a fresh permutation, incomplete batches are dropped."""
    size = min(size, count)
    for epoch in range(2**31):
        order = np.random.default_rng([seed, epoch]).permutation(count)
        for start in range(0, count - size + 1, size):
            yield order[start : start + size]
