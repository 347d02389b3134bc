"""Rollouts from the trainer's own forward, to the bit: a control whose sampler and trainer do not differ at all.

An engine decodes token by token, with a cache and kernels of its own, so even in BF16 its log-probs are not quite those
of the trainer's forward. Here its rollouts are guesses. The trainer's forward over all of them, in the micro-batches of
the update, gives the distribution at every position, and the uniform number that belongs to rollout and position draws
the token. Where that is another one the rollout goes on from there, until a forward over the whole batch draws every
token that it was given. This is the Jacobi iteration of Song et al., 2021, "Accelerating Feedforward Computation via
Parallel Nonlinear Equation Solving": the fixed point is what drawing one token after another gives. Each token is then
drawn from the very numbers that the update computes, and its recorded log-prob is the update's.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from score_centering.rollout import Rollout, Sampling, StreamEngine
from score_centering.rollout.local.local_engine import LocalEngine
from score_centering.rollout.local.sampling import draw, head, round_to_grid
from score_centering.rollout.streams import uniforms
from score_centering.settings import UserError
from score_centering.training.update import Updater

ROWS = 2048  # positions whose full distributions are held at once
PASSES = 8  # forwards over the whole batch


@dataclass(frozen=True)
class _Seen:
    """What the trainer's forward says of one rollout: the tokens it draws (R,), the log-probs (R,) of those that it was
    given, and the head (R, K), ids and log-probs on the grid."""

    drawn: np.ndarray
    logprobs: np.ndarray
    ids: np.ndarray
    head: np.ndarray


class ExactSampler(StreamEngine):
    """An engine whose sampled rollouts come from `updater`'s forward; greedy ones are the guessing engine's own."""

    def __init__(self, guesses: LocalEngine, updater: Updater) -> None:
        self._guesses, self._updater = guesses, updater

    def sync(self, weights: dict[str, Tensor], step: int) -> None:
        self._guesses.sync(weights, step)

    def close(self) -> None:
        self._guesses.close()

    def generate_streams(
        self,
        prompts: Sequence[Sequence[int]],
        owner: np.ndarray,
        stream: np.ndarray,
        sampling: Sampling,
        top_logprobs: int,
    ) -> list[Rollout]:
        """See `StreamEngine`; the whole batch of one update at a time, since its shape is part of the numbers.

        Raises:
            UserError: the forward does not settle: it gives other numbers for equal inputs.
        """
        rollouts = self._guesses.generate_streams(prompts, owner, stream, sampling, top_logprobs)
        if sampling.greedy:
            return rollouts
        uniform = uniforms(stream, sampling.max_tokens)
        for _ in range(PASSES):
            seen = dict(enumerate(self._look(rollouts, uniform, top_logprobs)))
            open_ones = [i for i, found in seen.items() if not _settled(rollouts[i], found, sampling)]
            if not open_ones:
                return [_recorded(rollout, seen[i], sampling) for i, rollout in enumerate(rollouts)]
            for _ in range(2 * sampling.max_tokens):  # each makes one more token of a rollout right
                for i in open_ones:
                    rollouts[i] = _onward(rollouts[i], seen[i], sampling)
                found = self._look([rollouts[i] for i in open_ones], uniform[open_ones], top_logprobs)
                seen |= zip(open_ones, found, strict=True)
                open_ones = [i for i in open_ones if not _settled(rollouts[i], seen[i], sampling)]
                if not open_ones:
                    break
        raise UserError(
            f"actor_rollout_ref.rollout.exact: {PASSES} forwards of the trainer over the same rollouts do not agree; "
            "the last checkpoint is kept"
        )

    @torch.no_grad()
    def _look(self, rollouts: Sequence[Rollout], uniform: np.ndarray, top_logprobs: int) -> list[_Seen]:
        """One forward over `rollouts`, in the micro-batches of an update."""
        seen: dict[int, _Seen] = {}
        for part, hidden, logprobs in self._updater.forward([_blank(rollout, top_logprobs) for rollout in rollouts]):
            lengths = [len(rollouts[i].token_ids) for i in part]
            numbers = np.concatenate([uniform[i, :length] for i, length in zip(part, lengths, strict=True)])
            found = []
            for rows, given, number in zip(
                hidden.split(ROWS),
                logprobs.split(ROWS),
                torch.from_numpy(numbers).to(hidden.device).split(ROWS),
                strict=True,
            ):
                log_p = torch.log_softmax(self._updater.logits(rows), dim=-1)
                values, ids = head(log_p, top_logprobs) if top_logprobs else (log_p[:, :0], given[:, None][:, :0].int())
                found.append((draw(log_p, number), given, ids.int(), round_to_grid(values)))
            columns = [torch.cat(column).cpu().numpy() for column in zip(*found, strict=True)]
            cuts = np.cumsum(lengths)[:-1]
            parts = zip(*(np.split(column, cuts) for column in columns), strict=True)
            seen |= {i: _Seen(*columns_of) for i, columns_of in zip(part, parts, strict=True)}
        return [seen[i] for i in range(len(rollouts))]


def _blank(rollout: Rollout, top_logprobs: int) -> Rollout:
    """The tokens of `rollout` with a record that says nothing: what the forward needs to tell their log-probs."""
    count = len(rollout.token_ids)
    ids = np.tile(np.arange(top_logprobs, dtype=np.int32), (count, 1)) if top_logprobs else None
    return replace(
        rollout,
        logprobs=np.zeros(count, np.float32),
        candidate_ids=ids,
        candidate_logprobs=None if ids is None else np.full(ids.shape, -20.0, np.float32),
    )


def _settled(rollout: Rollout, seen: _Seen, sampling: Sampling) -> bool:
    return np.array_equal(rollout.token_ids, seen.drawn) and _ended(rollout.token_ids, sampling)


def _ended(tokens: np.ndarray, sampling: Sampling) -> bool:
    return bool(tokens[-1] in sampling.stop_token_ids or len(tokens) == sampling.max_tokens)


def _onward(rollout: Rollout, seen: _Seen, sampling: Sampling) -> Rollout:
    """The drawn tokens up to the first that ends the response; one more, a guess, where none does.

    The first token that differs is right, since all before it are; those after it are guesses as well.
    """
    tokens = seen.drawn.astype(np.int32)
    stops = np.flatnonzero(np.isin(tokens, sampling.stop_token_ids))
    if len(stops):
        tokens = tokens[: stops[0] + 1]
    elif len(tokens) < sampling.max_tokens:
        tokens = np.append(tokens, tokens[-1])
    return replace(rollout, token_ids=tokens)


def _recorded(rollout: Rollout, seen: _Seen, sampling: Sampling) -> Rollout:
    """`rollout` with what the forward said of it."""
    return replace(
        rollout,
        logprobs=seen.logprobs,
        candidate_ids=seen.ids if seen.ids.shape[1] else None,
        candidate_logprobs=seen.head if seen.ids.shape[1] else None,
        finish_reason="stop" if rollout.token_ids[-1] in sampling.stop_token_ids else "length",
    )
