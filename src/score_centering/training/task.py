"""What a run asks and how its answers are judged: the prompts of each step, their seeds, the score of each response.

Everything random in a step is a function of (seed, step), so a resumed run repeats the steps it lost.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerBase

from score_centering.data import Problem
from score_centering.model.chat import encode_prompt, generation_eos, read_responses, stop_token_ids
from score_centering.reward import Scorer
from score_centering.reward.scorer import ScoreResult
from score_centering.rollout import Rollout, Sampling
from score_centering.settings import UserError
from score_centering.settings.stages import TrainStage

CLEAN = 1  # tells the seed of the clean reward's rollouts from that of the step's own


@dataclass(frozen=True)
class Inputs:
    """What a run reads: problems of both splits, the base weights' folder, the quantised model's config.json."""

    train: Sequence[Problem]
    validation: Sequence[Problem]
    model_folder: Path
    quantised_config: Path | None


@dataclass(frozen=True)
class Prompt:
    """A problem, the token ids that ask for its solution, and its gold answer."""

    problem: str
    ids: tuple[int, ...]
    answer: str


class Task:
    """The prompts of one run, how they are sampled, and the scores of what comes back.

    Raises:
        UserError: no prompt is short enough, or more candidates are asked for than the vocabulary has.
    """

    def __init__(
        self, stage: TrainStage, seed: int, inputs: Inputs, tokenizer: PreTrainedTokenizerBase, vocab_size: int
    ) -> None:
        _check_candidates(stage, vocab_size)
        self._stage, self._seed, self.tokenizer, self.vocab_size = stage, seed, tokenizer, vocab_size
        self.train = self._encode(inputs.train, "training")
        self.validation = self._encode(inputs.validation[: stage.data.val_batch_size], "validation")
        self.top_logprobs = stage.score_centering.candidates
        self.stop_token_ids = stop_token_ids(tokenizer, generation_eos(inputs.model_folder))

    def prompts(self, step: int) -> list[Prompt]:
        """Training prompts of `step`: consecutive pieces of a fresh permutation for every epoch."""
        size, count = self._stage.data.train_batch_size, len(self.train)
        positions = np.arange((step - 1) * size, step * size)
        orders = {
            e: np.random.default_rng([self._seed, int(e)]).permutation(count) for e in np.unique(positions // count)
        }
        return [self.train[orders[position // count][position % count]] for position in positions]

    def seed(self, step: int, *domain: int) -> int:
        """Seed of the rollouts of `step`."""
        return int(np.random.SeedSequence([self._seed, step, *domain]).generate_state(1, np.uint32)[0])

    def sampling(self, greedy: bool = False, temperature: float | None = None) -> Sampling:
        """How responses are sampled: at the configured temperature unless another is given."""
        return Sampling(
            temperature=temperature or self._stage.actor_rollout_ref.rollout.temperature,
            max_tokens=self._stage.data.max_response_length,
            greedy=greedy,
            stop_token_ids=self.stop_token_ids,
        )

    def score(self, scorer: Scorer, rollouts: Sequence[Rollout], prompts: Sequence[Prompt]) -> ScoreResult:
        """Each rollout against the answer of its own prompt; one that was cut at the response limit scores 0."""
        texts, thinking = read_responses(self.tokenizer, rollouts)
        answers = [prompts[rollout.prompt_index].answer for rollout in rollouts]
        return scorer.score(texts, answers, [rollout.finish_reason == "length" for rollout in rollouts], thinking)

    def _encode(self, problems: Sequence[Problem], split: str) -> list[Prompt]:
        prompt, limit = self._stage.prompt, self._stage.data.max_prompt_length
        encoded = [
            Prompt(
                problem=p.prompt,
                ids=tuple(encode_prompt(self.tokenizer, p.prompt, prompt.instruction, prompt.enable_thinking)),
                answer=p.answer,
            )
            for p in problems
        ]
        kept = [prompt for prompt in encoded if len(prompt.ids) <= limit]
        if not kept:
            raise UserError(f"data.max_prompt_length = {limit}: every {split} prompt is longer")
        if len(kept) < len(encoded):
            dropped = len(encoded) - len(kept)
            print(f"dropped {dropped} of {len(encoded)} {split} prompts: over {limit} tokens", file=sys.stderr)
        return kept


def _check_candidates(stage: TrainStage, vocab_size: int) -> None:
    k = stage.score_centering.candidates
    if k > vocab_size:
        raise UserError(f"score_centering.top_logprobs_num = {k} exceeds the model's vocabulary of {vocab_size} tokens")
