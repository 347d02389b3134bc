"""Both entries against the float64 reference: every objective, dtype, odd shape, temperature and chunking."""

from dataclasses import replace

import pytest
import torch
from torch.overrides import TorchFunctionMode

from score_centering.objectives import policy_loss_from_hidden, policy_loss_from_logits

# Largest error of a gradient relative to its largest entry. In bfloat16 the gradient of the logits and the result are
# rounded.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 2**-7}


def relative_error(value, wanted):
    return float((value.double() - wanted).abs().max() / wanted.abs().max().clamp_min(1e-30))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logits_entry_equals_the_dense_reference(reference, objective, dtype, temperature):
    logits, batch = reference.random_batch(tokens=37, vocab=101, candidates=9)
    logits = logits.to(dtype).requires_grad_()
    result = policy_loss_from_logits(logits, batch, objective, temperature, chunk_size=10)
    result.loss.backward()
    wanted = reference.token_values(logits.detach(), batch, objective, temperature)
    assert (
        relative_error(logits.grad, reference.dense_gradient(logits, batch, objective, temperature)) < TOLERANCE[dtype]
    )
    assert result.loss.item() == pytest.approx(float((wanted * batch.loss_weights).sum()), rel=1e-4)
    assert logits.grad.dtype == dtype


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_hidden_entry_gives_both_gradients(reference, objective, dtype):
    _, batch = reference.random_batch(tokens=37, vocab=101, candidates=9)
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(37, 16, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(101, 16, generator=generator, dtype=torch.float64).div(4).to(dtype).requires_grad_()
    result = policy_loss_from_hidden(hidden, weight, batch, objective, 1.3, chunk_size=8)
    result.loss.backward()
    dense = reference.dense_gradient(hidden.detach().double() @ weight.detach().double().T, batch, objective, 1.3)
    assert relative_error(hidden.grad, dense @ weight.detach().double()) < TOLERANCE[dtype]
    assert relative_error(weight.grad, dense.T @ hidden.detach().double()) < TOLERANCE[dtype]
    assert hidden.grad.dtype == weight.grad.dtype == dtype


def test_float32_weight_beside_bfloat16_states_keeps_a_float32_gradient(reference):
    objective = reference.objectives["sc"]
    _, batch = reference.random_batch(tokens=20, vocab=50, candidates=5)
    hidden = torch.randn(20, 8).bfloat16()
    weight = torch.randn(50, 8).requires_grad_()
    policy_loss_from_hidden(hidden, weight, batch, objective).loss.backward()
    dense = reference.dense_gradient(hidden.double() @ weight.detach().bfloat16().double().T, batch, objective)
    assert weight.grad.dtype == torch.float32
    assert relative_error(weight.grad, dense.T @ hidden.double()) < 2**-8


@pytest.mark.parametrize(
    ("tokens", "vocab", "candidates", "chunk"), [(1, 2, 1, 1), (1, 33, 33, 4), (5, 7, 7, 2), (13, 257, 31, 13)]
)
def test_odd_shapes_and_k_equal_to_v(reference, objective, tokens, vocab, candidates, chunk):
    logits, batch = reference.random_batch(tokens, vocab, candidates)
    logits.requires_grad_()
    policy_loss_from_logits(logits, batch, objective, chunk_size=chunk).loss.backward()
    wanted = reference.dense_gradient(logits, batch, objective)
    assert float((logits.grad - wanted).abs().max()) < 1e-5 * float(batch.advantages.abs().max())


def test_padded_vocabulary_columns_of_minus_infinity_get_no_gradient(reference, objective):
    logits, batch = reference.random_batch(tokens=6, vocab=20, candidates=4)
    padded = torch.cat([logits, torch.full((6, 3), -torch.inf, dtype=torch.float64)], 1).requires_grad_()
    result = policy_loss_from_logits(padded, batch, objective)
    result.loss.backward()
    plain = policy_loss_from_logits(logits, batch, objective)
    assert torch.equal(padded.grad[:, 20:], torch.zeros(6, 3, dtype=torch.float64))
    assert torch.allclose(padded.grad[:, :20], reference.dense_gradient(logits, batch, objective), atol=1e-14)
    assert torch.allclose(result.terms.entropy, plain.terms.entropy)


def test_the_loss_needs_no_gradient_when_nobody_asks(reference, objective):
    logits, batch = reference.random_batch(tokens=6, vocab=20, candidates=4)
    result = policy_loss_from_logits(logits, batch, objective)
    assert not result.loss.requires_grad
    assert torch.allclose(result.logprobs, torch.log_softmax(logits, 1).gather(1, batch.target_ids[:, None]).squeeze(1))


def test_frozen_inputs_get_no_gradient(reference):
    _, batch = reference.random_batch(tokens=6, vocab=20, candidates=4)
    hidden = torch.randn(6, 4, requires_grad=True)
    weight = torch.randn(20, 4)
    policy_loss_from_hidden(hidden, weight, batch, reference.objectives["sc"]).loss.backward()
    assert weight.grad is None
    assert hidden.grad.abs().sum() > 0


def test_the_gradient_follows_the_factor_on_the_loss(reference):
    logits, batch = reference.random_batch(tokens=6, vocab=20, candidates=4)
    once, thrice = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    objective = reference.objectives["sc_tis"]
    policy_loss_from_logits(once, batch, objective).loss.backward()
    (3 * policy_loss_from_logits(thrice, batch, objective).loss).backward()
    assert torch.allclose(thrice.grad, 3 * once.grad)


def test_a_second_backward_is_refused(reference):
    logits, batch = reference.random_batch(tokens=6, vocab=20, candidates=4)
    loss = policy_loss_from_logits(logits.requires_grad_(), batch, reference.objectives["sc"]).loss
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="backward ran twice"):
        loss.backward()


def test_no_tensor_of_tokens_times_vocabulary_is_made(reference):
    """The largest tensor of a whole forward and backward pass is one chunk of logits."""

    class Largest(TorchFunctionMode):
        elements = 0

        def __torch_function__(self, function, types, args=(), kwargs=None):
            outputs = function(*args, **(kwargs or {}))
            for output in outputs if isinstance(outputs, tuple | list) else (outputs,):
                if isinstance(output, torch.Tensor):
                    self.elements = max(self.elements, output.numel())
            return outputs

    _, batch = reference.random_batch(tokens=64, vocab=500, candidates=9)
    hidden = torch.randn(64, 4, requires_grad=True)
    weight = torch.randn(500, 4, requires_grad=True)
    with Largest() as largest:
        policy_loss_from_hidden(hidden, weight, batch, reference.objectives["sc"], chunk_size=8).loss.backward()
    assert largest.elements == 8 * 500


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"temperature": 0.0}, "temperature 0.0 must be positive"),
        ({"temperature": float("inf")}, "must be positive and finite"),
        ({"chunk_size": 0}, "chunk_size 0 must be at least 1"),
    ],
)
def test_bad_arguments_are_refused(reference, change, message):
    logits, batch = reference.random_batch(tokens=6, vocab=20, candidates=4)
    with pytest.raises(ValueError, match=message):
        policy_loss_from_logits(logits, batch, reference.objectives["sc"], **change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"candidate_ids": None}, "score centering needs candidate_ids"),
        ({"advantages": torch.zeros(5)}, r"advantages has shape \(5,\) for 6 tokens"),
        ({"mask": torch.ones(6)}, "mask is torch.float32; it must be torch.bool"),
        ({"candidate_logprobs": torch.zeros(6, 3)}, "must both be"),
        (
            {"candidate_ids": torch.zeros(6, 21), "candidate_logprobs": torch.zeros(6, 21)},
            "K = 21 candidates of a vocabulary of 20",
        ),
        ({"candidate_ids": torch.zeros(5, 4), "candidate_logprobs": torch.zeros(5, 4)}, "must both be"),
    ],
)
def test_bad_batches_are_refused(reference, change, message):
    logits, batch = reference.random_batch(tokens=6, vocab=20, candidates=4)
    with pytest.raises(ValueError, match=message):
        policy_loss_from_logits(logits, replace(batch, **change), reference.objectives["sc"])


@pytest.mark.parametrize(
    ("hidden", "weight", "message"),
    [
        (torch.zeros(6, 4), torch.zeros(20, 5), "must be"),
        (torch.zeros(6, 4), torch.zeros(20, 4, dtype=torch.bfloat16), "one dtype for both"),
        (
            torch.zeros(6, 4, dtype=torch.float16),
            torch.zeros(20, 4, dtype=torch.float16),
            "torch.float16 is not one of",
        ),
    ],
)
def test_bad_inputs_are_refused(reference, hidden, weight, message):
    _, batch = reference.random_batch(tokens=6, vocab=20, candidates=4)
    with pytest.raises(ValueError, match=message):
        policy_loss_from_hidden(hidden, weight, batch, reference.objectives["sc"])
