"""The fused loss on a GPU: Triton passes against PyTorch's, both entries against float64, and the memory it takes."""

from dataclasses import fields

import pytest
import torch

from score_centering.objectives import Objective, TokenBatch, policy_loss_from_hidden, policy_loss_from_logits
from score_centering.objectives.loss import row_statistics, softmax_times
from score_centering.objectives.weights import IcePop, Mis, Tis

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

OBJECTIVES = [
    Objective("grpo", False, clip_low=0.2, clip_high=0.3),
    Objective("sc", True),
    Objective("sc_tis", True, Tis(2.0)),
    Objective("sc_mis", True, Mis(0.5, 5.0)),
    Objective("sc_icepop", True, IcePop(2.0)),
    Objective("grpo_mis", False, Mis(0.5, 5.0)),
]
# Largest error relative to the largest entry of the float64 result of the same rounded inputs.
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2**-7}


def inputs(tokens, vocab, width, candidates, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, width, generator=generator, dtype=torch.float64).to(dtype)
    weight = torch.randn(vocab, width, generator=generator, dtype=torch.float64).mul(3 / width**0.5).to(dtype)
    logits = hidden.double() @ weight.double().T
    log_q = (logits + 0.5 * torch.randn(tokens, vocab, generator=generator, dtype=torch.float64)).log_softmax(1)
    head = log_q.topk(candidates, 1)
    target = torch.multinomial(log_q.exp(), 1, generator=generator)
    batch = TokenBatch(
        target_ids=target.squeeze(1),
        sampler_logprobs=log_q.gather(1, target).squeeze(1).float(),
        advantages=torch.randn(tokens, generator=generator),
        loss_weights=torch.full((tokens,), 1 / tokens),
        mask=torch.rand(tokens, generator=generator) > 0.1,
        candidate_ids=head.indices.int(),
        candidate_logprobs=head.values.float(),
    )
    return hidden, weight, batch


def on_gpu(batch):
    return TokenBatch(
        **{f.name: None if getattr(batch, f.name) is None else getattr(batch, f.name).cuda() for f in fields(batch)}
    )


def run(hidden, weight, batch, objective, chunk_size):
    hidden, weight = hidden.detach().clone().requires_grad_(), weight.detach().clone().requires_grad_()
    result = policy_loss_from_hidden(hidden, weight, batch, objective, 1.3, chunk_size)
    result.loss.backward()
    return result, hidden.grad, weight.grad


def error(value, wanted):
    return float((value.double().cpu() - wanted).abs().max() / wanted.abs().max().clamp_min(1e-30))


@pytest.fixture(autouse=True)
def full_float32_products():
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("objective", OBJECTIVES, ids=lambda objective: objective.name)
@pytest.mark.parametrize(
    ("tokens", "vocab", "candidates", "chunk"), [(1, 33, 33, 4), (67, 5003, 32, 16), (130, 4096, 128, 64)]
)
def test_hidden_entry_equals_float64(objective, dtype, tokens, vocab, candidates, chunk):
    hidden, weight, batch = inputs(tokens, vocab, 64, candidates, dtype)
    wanted, hidden_gradient, weight_gradient = run(hidden.double(), weight.double(), batch, objective, chunk)
    result, ours, ours_weight = run(hidden.cuda(), weight.cuda(), on_gpu(batch), objective, chunk)
    assert result.loss.item() == pytest.approx(wanted.loss.item(), rel=1e-3, abs=1e-6)
    assert error(result.logprobs, wanted.logprobs) < 1e-5
    assert error(result.terms.entropy, wanted.terms.entropy) < 1e-5
    assert error(ours, hidden_gradient) < TOLERANCE[dtype]
    assert error(ours_weight, weight_gradient) < TOLERANCE[dtype] * (1 if dtype == torch.float32 else 2)
    for name, value in wanted.sums.items():
        assert result.sums[name].tolist() == pytest.approx(value.tolist(), rel=1e-3, abs=1e-4), name


def test_gradient_of_a_bf16_head_does_not_depend_on_the_chunks():
    """Partial sums are FP32 and rounded once: chunks of 1 and 7 rows differ from one chunk by one BF16 step at most."""
    hidden, weight, batch = inputs(257, 4096, 64, 32, torch.bfloat16)
    gradients = {
        chunk: run(hidden.cuda(), weight.cuda(), on_gpu(batch), OBJECTIVES[1], chunk)[2] for chunk in (1, 7, 257)
    }
    whole = gradients[257].double()
    assert gradients[257].dtype == torch.bfloat16
    for chunk in (1, 7):
        # Where terms cancel, FP32's own rounding is larger than a step of the small sum.
        step = whole.abs() * 2**-7 + whole.abs().max() * 2**-16
        assert ((gradients[chunk].double() - whole).abs() <= step).all(), chunk


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("objective", OBJECTIVES, ids=lambda objective: objective.name)
def test_logits_entry_equals_float64(objective, dtype):
    hidden, weight, batch = inputs(67, 5003, 64, 32, torch.float32)
    logits = (hidden.double() @ weight.double().T).to(dtype)
    gradients = []
    for values, rows in ((logits.double(), batch), (logits.cuda(), on_gpu(batch))):
        values = values.detach().requires_grad_()
        policy_loss_from_logits(values, rows, objective, chunk_size=20).loss.backward()
        gradients.append(values.grad)
    assert error(gradients[1], gradients[0]) < TOLERANCE[dtype]


def test_float32_weight_beside_bfloat16_states():
    hidden, weight, batch = inputs(67, 5003, 64, 32, torch.bfloat16)
    _, hidden_gradient, weight_gradient = run(hidden.double(), weight.double(), batch, OBJECTIVES[1], 16)
    _, ours, ours_weight = run(hidden.cuda(), weight.float().cuda(), on_gpu(batch), OBJECTIVES[1], 16)
    assert ours_weight.dtype == torch.float32
    assert error(ours, hidden_gradient) < 2**-7
    assert error(ours_weight, weight_gradient) < 2**-7


def test_masked_rows_of_nan_reach_nothing():
    hidden, weight, batch = inputs(67, 5003, 64, 32, torch.bfloat16)
    poisoned = torch.where(batch.mask[:, None], hidden, torch.nan)
    clean, dirty = (run(h.cuda(), weight.cuda(), on_gpu(batch), OBJECTIVES[1], 16) for h in (hidden, poisoned))
    assert all(torch.equal(a, b) for a, b in zip(clean[1:], dirty[1:], strict=True))
    assert torch.equal(clean[0].loss, dirty[0].loss)


@pytest.mark.parametrize("columns", [5, 4096, 4097, 100_003])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_triton_passes_equal_pytorch(columns, temperature):
    from score_centering.objectives import triton_kernels

    generator = torch.Generator("cuda").manual_seed(columns)
    logits = 8 * torch.randn(13, columns, generator=generator, device="cuda")
    logits[:, -2:] = -torch.inf
    normaliser, entropy = triton_kernels.row_statistics(logits, temperature)
    wanted_normaliser, wanted_entropy = row_statistics(logits.double(), temperature)
    assert float((normaliser - wanted_normaliser).abs().max()) < 1e-5
    assert float((entropy - wanted_entropy).abs().max()) < 1e-4
    factor = torch.randn(13, generator=generator, device="cuda")
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 2**-8)):
        ours = torch.full((13, columns), torch.nan, dtype=dtype, device="cuda")
        wanted = torch.empty(13, columns, dtype=torch.float64, device="cuda")
        triton_kernels.softmax_times(logits, normaliser, factor, temperature, ours)
        softmax_times(logits.double(), wanted_normaliser, factor.double(), temperature, wanted)
        assert float((ours - wanted).abs().max()) <= tolerance * float(wanted.abs().max())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_gradient_follows_the_factor_on_the_loss(dtype):
    hidden, weight, batch = inputs(67, 5003, 64, 32, dtype)
    gradients = []
    for factor in (1.0, -2.0):
        states, head = hidden.cuda().requires_grad_(), weight.cuda().requires_grad_()
        (factor * policy_loss_from_hidden(states, head, on_gpu(batch), OBJECTIVES[1]).loss).backward()
        gradients.append((states.grad, head.grad))
    assert all(torch.equal(-2 * once, scaled) for once, scaled in zip(*gradients, strict=True))


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize(
    ("tokens", "gradients"), [(4096, 2 * 512 + 4 * 256), (512, 2 * 512)], ids=["summed", "at_once"]
)
def test_the_loss_waits_for_nothing_and_holds_one_chunk(tokens, gradients):
    """No host synchronisation, and beside the two gradients one chunk of float32 logits and `gradients` bytes × V.

    Above 2·D tokens a chunk's gradients in bfloat16 and the float32 sum of the head's, up to there those of all rows.
    """
    vocab, width, chunk = 32_768, 256, 512
    hidden, weight, batch = inputs(256, vocab, width, 128, torch.bfloat16)
    batch = on_gpu(
        TokenBatch(
            **{
                f.name: getattr(batch, f.name).repeat_interleave(tokens // 256, 0)
                for f in fields(batch)
                if getattr(batch, f.name) is not None
            }
        )
    )
    hidden, weight = hidden.repeat_interleave(tokens // 256, 0).cuda().requires_grad_(), weight.cuda().requires_grad_()
    for _ in range(2):
        hidden.grad = weight.grad = None
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        torch.cuda.set_sync_debug_mode("error")
        try:
            policy_loss_from_hidden(hidden, weight, batch, OBJECTIVES[1], chunk_size=chunk).loss.backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    extra = torch.cuda.max_memory_allocated() - before - hidden.nbytes - weight.nbytes
    small = 8 * 4 * 128 * max(tokens, 2 * chunk)  # terms a candidate: of all tokens, or the temporaries of one chunk
    assert extra < (4 * chunk + gradients) * vocab + small


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_heads_gradient_does_not_depend_on_the_chunk_size(dtype):
    """Summed over chunks in float32 and rounded once: 64 chunks differ from one by the last bit at most."""
    hidden, weight, batch = inputs(2048, 512, 64, 8, torch.bfloat16)
    hidden, weight, batch = hidden.cuda(), weight.to(dtype).cuda(), on_gpu(batch)
    gradients = [run(hidden, weight, batch, Objective("sc", True), chunk)[2].double() for chunk in (32, 2048)]
    scale = gradients[1].abs().max()
    assert (gradients[0] - gradients[1]).abs().max() <= scale * (2**-8 if dtype == torch.bfloat16 else 1e-5)
    assert ((gradients[0] - gradients[1]).abs() > 1e-5 * scale).double().mean() < 0.02, "most are equal to the last bit"
