"""Scoring in pieces: the same numbers as in one, and no tensor that grows with the rollouts' number or length."""

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from score_centering.rollout import Rollout
from score_centering.validation import trainer_forward

VOCABULARY = 64


def rollouts(lengths, candidates=3, seed=0):
    random = np.random.default_rng(seed)
    made = []
    for index, length in enumerate(lengths):
        ids = np.stack([random.permutation(VOCABULARY)[:candidates] for _ in range(length)]).astype(np.int32)
        made.append(
            Rollout(
                prompt_index=index,
                sample_index=0,
                prompt_ids=random.integers(0, VOCABULARY, 4).astype(np.int32),
                token_ids=random.integers(0, VOCABULARY, length).astype(np.int32),
                logprobs=np.full(length, -1.0, np.float32),
                candidate_ids=ids,
                candidate_logprobs=np.full((length, candidates), -2.0, np.float32),
                finish_reason="length",
            )
        )
    return made


class Largest(TorchDispatchMode):
    """The largest storage that an operation makes."""

    size = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        storages = [leaf.untyped_storage().nbytes() for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        self.size = max(self.size, *storages, 0)
        return result


def test_batches_hold_so_many_rollouts_and_tokens_and_keep_the_order():
    made = rollouts([2, 4, 4, 20, 1, 1])  # with four tokens of prompt: 6, 8, 8, 24, 5, 5
    shapes = [tuple(batch.input_ids.shape) for batch in trainer_forward.batches(made, 3, "cpu", tokens=16)]
    assert shapes == [(2, 8), (1, 8), (1, 24), (2, 5)], "a rollout longer than the limit is a batch of its own"
    whole = [tuple(batch.input_ids.shape) for batch in trainer_forward.batches(made, 3, "cpu")]
    assert whole == [(3, 8), (3, 24)]
    tokens = torch.cat([batch.token_ids for batch in trainer_forward.batches(made, 3, "cpu", tokens=16)])
    assert tokens.tolist() == np.concatenate([rollout.token_ids for rollout in made]).tolist()


def test_pieces_give_what_the_whole_gives(tiny_qwen, monkeypatch):
    made = rollouts([7, 12, 3, 30])
    whole = trainer_forward.score(tiny_qwen.model, made, 0.8, 4, "cpu")
    # By hand: log p of the first token of the first rollout from the model's own logits.
    ids = torch.tensor([[*made[0].prompt_ids, *made[0].token_ids]], dtype=torch.int64)
    hidden = tiny_qwen.model.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state[0, 3].float()
    logits = hidden @ tiny_qwen.model.lm_head.weight.float().T / 0.8
    assert whole.log_p[0].item() == pytest.approx(logits.log_softmax(-1)[made[0].token_ids[0]].item(), abs=2e-2)
    monkeypatch.setattr(trainer_forward, "CHUNK_BYTES", {"cpu": 8 * VOCABULARY * 5})  # five positions
    monkeypatch.setattr(trainer_forward, "FORWARD_TOKENS", 40)
    log_probs, sizes = trainer_forward.log_probs, []

    def counted(hidden, weight, temperature):
        sizes.append(len(hidden))
        return log_probs(hidden, weight, temperature)

    monkeypatch.setattr(trainer_forward, "log_probs", counted)
    pieces = trainer_forward.score(tiny_qwen.model, made, 0.8, 4, "cpu")
    # Batches of 7 + 12, 3 and 30 generated tokens, in chunks of five at most.
    assert sizes == [5, 5, 5, 4, 3, 5, 5, 5, 5, 5, 5]
    assert len(pieces.log_p) == 52 and torch.equal(pieces.log_q, whole.log_q)
    # BF16 activations round otherwise in a batch of another shape.
    torch.testing.assert_close(pieces.log_p, whole.log_p, rtol=0, atol=0.05)
    torch.testing.assert_close(pieces.candidate_log_p, whole.candidate_log_p, rtol=0, atol=0.05)
    assert (pieces.log_p - whole.log_p).abs().mean() < 5e-3


def test_no_tensor_grows_with_the_rollouts(tiny_qwen, monkeypatch):
    """The vocabulary's rows of a chunk are the largest tensor of the head, for ten and for forty rollouts."""
    monkeypatch.setattr(trainer_forward, "CHUNK_BYTES", {"cpu": 8 * VOCABULARY * 200})
    monkeypatch.setattr(trainer_forward, "FORWARD_TOKENS", 256)
    largest = []
    for count in (10, 40):
        made = rollouts([60] * count, candidates=2)
        with Largest() as mode:
            trainer_forward.score(tiny_qwen.model, made, 1.0, 32, "cpu")
        largest.append(mode.size)
    assert largest[0] == largest[1]
