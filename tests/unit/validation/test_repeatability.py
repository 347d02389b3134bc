"""The repeatability check sees what a kernel that reads stale memory does."""

import numpy as np
import pytest
import torch

from score_centering.rollout import Rollout
from score_centering.validation.repeatability import compare_repeats, poison_freed_memory


def rollout(tokens, logprobs=None, head=None) -> Rollout:
    return Rollout(
        prompt_index=0,
        sample_index=0,
        prompt_ids=np.array([1], dtype=np.int32),
        token_ids=np.array(tokens, dtype=np.int32),
        logprobs=np.array(logprobs or [-1.0] * len(tokens), dtype=np.float32),
        candidate_ids=None if head is None else np.zeros((len(tokens), 1), dtype=np.int32),
        candidate_logprobs=None if head is None else np.array(head, dtype=np.float32)[:, None],
        finish_reason="length",
    )


def test_equal_generations():
    numbers = compare_repeats([rollout([1, 2])], [rollout([1, 2])])
    assert numbers == {"equal_tokens_share": 1.0, "max_logprob_difference": 0.0, "not_finite_logprobs": 0}


def test_an_unequal_token_and_a_missing_position_count():
    numbers = compare_repeats([rollout([1, 2, 3, 4])], [rollout([1, 9, 3], [-1.25, -5.0, -9.0])])
    assert numbers["equal_tokens_share"] == 2 / 4
    assert numbers["max_logprob_difference"] == 0.25, "after the first unequal token the prefixes differ"


def test_not_finite_logprobs_are_counted_in_both():
    first = rollout([1, 2], [-1.0, float("nan")], head=[-1.0, float("-inf")])
    assert compare_repeats([first], [rollout([1, 2])])["not_finite_logprobs"] == 2


@pytest.mark.parametrize("elements", [64, 1024, 65536])
def test_poisoned_memory_is_handed_out_again(elements):
    poison_freed_memory("cpu")
    blocks = [torch.empty(elements) for _ in range(64)]
    assert any(torch.isnan(block).any() for block in blocks)


def test_an_engine_that_reads_stale_memory_is_caught():
    def generate():
        stale = [torch.empty(4096) for _ in range(64)]  # a kernel that skips the last rows of its output
        total = float(torch.stack(stale).sum())
        return [rollout([3, 4], [-1.0, total * 0 - 1.0])]

    poison_freed_memory("cpu")
    first = generate()
    poison_freed_memory("cpu")
    assert compare_repeats(first, generate())["not_finite_logprobs"] == 2
