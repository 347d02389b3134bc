"""The trainer's forward over recorded rollouts: final hidden states and log-probs at the generated positions.

Both are taken in pieces, so that the memory does not grow with the number or the length of the rollouts: a forward
takes at most FORWARD_TOKENS tokens, padding counted (or one rollout, however long), a chunk of log-probs CHUNK_BYTES.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from score_centering.rollout import Rollout

FORWARD_TOKENS = 1 << 15
CHUNK_BYTES = {"cpu": 256 << 20, "cuda": 1 << 30}  # FP32 logits and log-probs of a chunk


@dataclass(frozen=True)
class Batch:
    """Rollouts as one right-padded batch of B rows and S columns, S the longest prompt and response together."""

    input_ids: Tensor  # (B, S) int64
    mask: Tensor  # (B, S) bool, no padding
    predicts: Tensor  # (B, S) bool, the positions whose next token was generated: T of them
    token_ids: Tensor  # (T,) int64, those next tokens


def batches(rollouts: Sequence[Rollout], size: int, device: str, tokens: int | None = None) -> Iterator[Batch]:
    """`rollouts` in their order: at most `size` a batch, and at most `tokens` tokens with padding (FORWARD_TOKENS)."""
    limit, chosen = FORWARD_TOKENS if tokens is None else tokens, list[Rollout]()
    longest = 0
    for rollout in rollouts:
        length = max(longest, len(rollout.prompt_ids) + len(rollout.token_ids))
        if chosen and (len(chosen) == size or length * (len(chosen) + 1) > limit):
            yield collate(chosen, device)
            chosen, length = [], len(rollout.prompt_ids) + len(rollout.token_ids)
        chosen.append(rollout)
        longest = length
    if chosen:
        yield collate(chosen, device)


def collate(rollouts: Sequence[Rollout], device: str) -> Batch:
    """One batch of `rollouts`; rows of `predicts` follow each other rollout by rollout."""
    length = max(len(r.prompt_ids) + len(r.token_ids) for r in rollouts)
    ids = np.zeros((len(rollouts), length), dtype=np.int64)
    mask = np.zeros((len(rollouts), length), dtype=bool)
    predicts = np.zeros((len(rollouts), length), dtype=bool)
    for row, rollout in enumerate(rollouts):
        prompt, end = len(rollout.prompt_ids), len(rollout.prompt_ids) + len(rollout.token_ids)
        ids[row, :prompt], ids[row, prompt:end] = rollout.prompt_ids, rollout.token_ids
        mask[row, :end] = True
        predicts[row, prompt - 1 : end - 1] = True
    token_ids = np.concatenate([rollout.token_ids for rollout in rollouts]).astype(np.int64)
    return Batch(*(torch.from_numpy(array).to(device) for array in (ids, mask, predicts, token_ids)))


def hidden_states(model: nn.Module, batch: Batch) -> Tensor:
    """Final hidden states (T, D) at the positions that predict a generated token.

    Without an attention mask, as the trainer runs it: padding on the right never reaches a causal position before it.
    """
    output = model.get_decoder()(input_ids=batch.input_ids, use_cache=False)
    return output.last_hidden_state[batch.predicts]


def log_probs(hidden: Tensor, lm_head_weight: Tensor, temperature: float) -> Tensor:
    """Log-probs of the next token, in FP32 throughout: hidden (T, D), lm_head_weight (V, D) → (T, V) float32."""
    return (hidden.float() @ lm_head_weight.float().T).div_(temperature).log_softmax(-1)


@dataclass(frozen=True)
class Scores:
    """What p says about rollouts of T tokens, and the sampler's own words on them."""

    log_p: Tensor  # (T,) of the sampled tokens
    log_q: Tensor  # (T,)
    candidate_log_p: Tensor  # (T, K) of the sampler's candidates
    candidate_log_q: Tensor  # (T, K)
    top1_agrees: Tensor  # (T,) bool: the most probable token of p is the sampler's


def chunk_rows(vocab_size: int, device_type: str) -> int:
    """Positions whose FP32 logits and log-probs are held at once."""
    return max(1, CHUNK_BYTES[device_type] // (8 * vocab_size))


@torch.no_grad()
def score(model: nn.Module, rollouts: Sequence[Rollout], temperature: float, size: int, device: str) -> Scores:
    """Score rollouts that carry candidates with the trainer's forward, at most `size` rollouts at a time."""
    log_p, candidate_log_p, top1 = [], [], []
    candidates = torch.from_numpy(np.concatenate([r.candidate_ids for r in rollouts]).astype(np.int64)).to(device)
    weight = model.lm_head.weight.float()
    rows = chunk_rows(len(weight), weight.device.type)
    start = 0
    for batch in batches(rollouts, size, device):
        for hidden, token_ids in zip(
            hidden_states(model, batch).split(rows), batch.token_ids[:, None].split(rows), strict=True
        ):
            dense = log_probs(hidden, weight, temperature)
            head = candidates[start : start + len(dense)]
            start += len(dense)
            log_p.append(dense.gather(-1, token_ids).squeeze(-1))
            candidate_log_p.append(dense.gather(-1, head))
            top1.append(dense.argmax(-1) == head[:, 0])
            del dense
    return Scores(
        log_p=torch.cat(log_p).cpu(),
        log_q=torch.from_numpy(np.concatenate([r.logprobs for r in rollouts])),
        candidate_log_p=torch.cat(candidate_log_p).cpu(),
        candidate_log_q=torch.from_numpy(np.concatenate([r.candidate_logprobs for r in rollouts])),
        top1_agrees=torch.cat(top1).cpu(),
    )


def dense_log_q(rollouts: Sequence[Rollout], vocab_size: int) -> Tensor:
    """The sampler's whole distribution (T, V) float32 from rollouts captured with K = V, summing to 1 again.

    The records have 16-bit precision (error below 5e-4 nats), which the renormalisation spreads over the vocabulary.
    """
    ids = torch.from_numpy(np.concatenate([r.candidate_ids for r in rollouts]).astype(np.int64))
    if ids.shape[1] != vocab_size:
        raise ValueError(f"rollouts carry {ids.shape[1]} candidates a position, the exact drift needs {vocab_size}")
    logprobs = torch.from_numpy(np.concatenate([r.candidate_logprobs for r in rollouts]))
    return torch.empty_like(logprobs).scatter_(-1, ids, logprobs).log_softmax(-1)
