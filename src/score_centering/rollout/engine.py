"""What a rollout engine is."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from score_centering.rollout.record import Rollout
from score_centering.rollout.streams import streams
from score_centering.settings import UserError

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen: from the full softmax at `temperature` (no top-p, no top-k), or greedily.

    Log-probs are those of the softmax at `temperature` in both cases.
    """

    temperature: float
    max_tokens: int
    greedy: bool
    stop_token_ids: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.temperature > 0:
            raise ValueError(
                f"sampling temperature is {self.temperature}, must be above 0 (greedy decoding is greedy=True)"
            )
        if self.max_tokens < 1:
            raise ValueError(f"sampling max_tokens is {self.max_tokens}, must be at least 1")


class Engine(Protocol):
    """Generates rollouts with the weights it was last synced with."""

    def sync(self, weights: "Mapping[str, Tensor]", step: int) -> None:
        """Takes weights in checkpoint format: Hugging Face names; a listed linear comes as `<name>.weight` int8 and
        `<name>.weight_scale` (out, 1) bfloat16, everything else as bfloat16. `step` is the update they belong to."""

    def generate(
        self, prompts: Sequence[Sequence[int]], n: int, sampling: Sampling, seed: int, top_logprobs: int
    ) -> list[Rollout]:
        """n rollouts of each prompt (token ids), prompt-major, sample-minor. `top_logprobs`: K candidates a position, 0
        for none.

        Rollout (i, j) depends on nothing but the weights, prompt i, the sampling, and (seed, i, j): not on what shares
        its batch.
        """

    def close(self) -> None:
        """Frees what the engine holds; it can't be used afterwards."""


class StreamEngine(ABC):
    """Generates rollouts that bring their own randomness, such as those of a server's requests."""

    @abstractmethod
    def generate_streams(
        self,
        prompts: Sequence[Sequence[int]],
        owner: np.ndarray,
        stream: np.ndarray,
        sampling: Sampling,
        top_logprobs: int,
    ) -> list[Rollout]:
        """One rollout for each stream.

        Args:
            owner: (N,) int64, the prompt of each rollout; ascending, every prompt occurs.
            stream: (N,) uint64, the stream of uniform numbers of each rollout (`rollout.streams`).
        """

    def generate(
        self, prompts: Sequence[Sequence[int]], n: int, sampling: Sampling, seed: int, top_logprobs: int
    ) -> list[Rollout]:
        """See `Engine`."""
        if n < 1:
            raise UserError(f"rollout engine: n is {n}, must be at least 1")
        index = np.arange(len(prompts) * n)
        owner = index // n
        return self.generate_streams(prompts, owner, streams(seed, owner, index % n), sampling, top_logprobs)


def sample_indices(owner: np.ndarray) -> np.ndarray:
    """Which sample of its prompt each rollout is: owner (N,) ascending → (N,) int64."""
    return np.arange(len(owner)) - np.searchsorted(owner, owner)
