"""The fused policy loss against a naive one, Liger's fused cross entropy, and the bare matrix products.

All on the same random inputs, forward and backward, gradients of hidden states and LM head included:

    naive     full float32 log-softmax and gather
    liger     Liger's fused linear cross entropy (CUDA, where liger-kernel is installed)
    grpo      ours without candidates
    sc        ours with score centering, K = 128
    products  hidden·Wᵀ and the two products of the backward pass, nothing else

and each correction of `WEIGHTS`, with centering where it composes, against sc.

Extra memory is the peak minus inputs minus both gradients.
"""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from statistics import median

import torch
from _common import median_seconds, parse_args, report
from torch import Tensor

from score_centering.objectives import WEIGHTS, Objective, TokenBatch, build_weight, policy_loss_from_hidden

GRPO = Objective("grpo", False, clip_low=0.2, clip_high=0.3)
SC = Objective("sc", True)
CANDIDATES = 128
GOALS = {
    "sc_over_products": 1.3,
    "sc_over_grpo": 1.05,
    "sc_over_liger": 1.0,
    "sc_extra_over_naive_extra": 0.1,
    "sc_extra_bytes": 3e9,
}
CORRECTION_LIMIT = 1.05  # of sc's time, for each correction
BOUNDS = {
    "tis_max": 2.0, "mis_min": 0.5, "mis_max": 5.0, "kpop_max": 0.1, "dppo_max": 0.2, "cispo_min": 0.0,
    "cispo_max": 5.0, "geo_min": 0.99, "geo_max": 1.01, "opsm_max": 0.5, "gspo_low": 3e-4, "gspo_high": 4e-4,
}  # fmt: skip
ROLLOUTS = 8  # that the tokens belong to
ROUNDS = 3


@dataclass(frozen=True)
class Size:
    tokens: int
    vocab: int
    width: int
    dtype: torch.dtype


@dataclass(frozen=True)
class Inputs:
    hidden: Tensor
    weight: Tensor
    batch: TokenBatch


SIZES = {
    ("cuda", False): Size(8192, 248_320, 4096, torch.bfloat16),
    ("cuda", True): Size(2048, 65_536, 2048, torch.bfloat16),
    ("cpu", False): Size(1024, 16_384, 128, torch.float32),
    ("cpu", True): Size(128, 8192, 128, torch.float32),
}


def make_inputs(size: Size, device: str, candidates: int, seed: int = 0) -> Inputs:
    """Logits of standard deviation 3; the sampler's head is the trainer's top K with log-probs off by 0.1 nats."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device, dtype=dtype)

    hidden = normal(size.tokens, size.width, dtype=size.dtype)
    weight = normal(size.vocab, size.width, dtype=size.dtype).mul_(3 / size.width**0.5)
    heads = []
    for rows in hidden.split(256):
        log_p = (rows @ weight.T).float().log_softmax(1)
        heads.append(log_p.topk(candidates, 1))
    ids = torch.cat([head.indices for head in heads])
    logprobs = torch.cat([head.values for head in heads])
    logprobs = (logprobs + 0.1 * normal(*logprobs.shape)).clamp_(max=0)
    batch = TokenBatch(
        target_ids=ids[:, candidates // 2].clone(),
        sampler_logprobs=logprobs[:, candidates // 2].clone(),
        advantages=normal(size.tokens),
        loss_weights=torch.full((size.tokens,), 1 / size.tokens, device=device),
        mask=torch.ones(size.tokens, dtype=torch.bool, device=device),
        candidate_ids=ids.int(),
        candidate_logprobs=logprobs,
        sequence_ids=torch.arange(size.tokens, device=device) * ROLLOUTS // size.tokens,
    )
    return Inputs(hidden.requires_grad_(), weight.requires_grad_(), batch)


def ours(inputs: Inputs, objective: Objective) -> None:
    policy_loss_from_hidden(inputs.hidden, inputs.weight, inputs.batch, objective).loss.backward()


def naive(inputs: Inputs) -> None:
    log_p = (inputs.hidden @ inputs.weight.T).float().log_softmax(1)
    log_p_y = log_p.gather(1, inputs.batch.target_ids[:, None]).squeeze(1)
    (-inputs.batch.advantages * inputs.batch.loss_weights * log_p_y).sum().backward()


def liger(inputs: Inputs) -> None:
    from liger_kernel.transformers.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyLoss

    LigerFusedLinearCrossEntropyLoss()(inputs.weight, inputs.hidden, inputs.batch.target_ids).backward()


@torch.no_grad()
def products(inputs: Inputs) -> None:
    logits = inputs.hidden @ inputs.weight.T
    torch.mm(logits, inputs.weight)
    torch.mm(logits.T, inputs.hidden)


def drop_gradients(inputs: Inputs) -> None:
    inputs.hidden.grad = inputs.weight.grad = None


def extra_bytes(case: Callable[[Inputs], None], inputs: Inputs) -> int:
    """Peak of CUDA memory during `case` above what was there before and both gradients."""
    drop_gradients(inputs)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    case(inputs)
    gradients = inputs.hidden.nbytes + inputs.weight.nbytes
    return torch.cuda.max_memory_allocated() - before - gradients


def seconds(case: Callable[[Inputs], None], inputs: Inputs, device: str, repeats: int) -> float:
    def run() -> None:
        drop_gradients(inputs)
        case(inputs)

    return median_seconds(run, device, repeats)


def corrections(size: Size, device: str, repeats: int) -> dict[str, float]:
    """Seconds of each correction over those of `sc`, the two timed in turn; centred where it can be."""
    inputs = make_inputs(size, device, CANDIDATES)
    figures = {}
    for mode in WEIGHTS:
        objective = Objective(mode, False, build_weight(mode, BOUNDS))
        if not objective.weighs_rollouts:
            objective = replace(objective, centering=True)
        ratios = []
        for _ in range(ROUNDS):
            time = seconds(partial(ours, objective=objective), inputs, device, repeats)
            ratios.append(time / seconds(partial(ours, objective=SC), inputs, device, repeats))
        figures[f"{mode}_over_sc"] = median(ratios)
        print(f"{mode} over sc: {figures[f'{mode}_over_sc']:.3f}", flush=True)
    return figures


def growth(size: Size, device: str, repeats: int) -> dict[str, float]:
    """Seconds of `sc` and its ratio to the products when T, V or K alone changes."""
    variants = {
        **{
            f"T={t}": (Size(t, size.vocab, size.width, size.dtype), CANDIDATES)
            for t in (size.tokens // 8, size.tokens // 2)
        },
        **{
            f"V={v}": (Size(size.tokens, v, size.width, size.dtype), CANDIDATES)
            for v in (size.vocab // 8, size.vocab // 2)
        },
        **{f"K={k}": (size, k) for k in (8, 32, 512)},
    }
    figures = {}
    for name, (variant, candidates) in variants.items():
        inputs = make_inputs(variant, device, candidates)
        time = seconds(partial(ours, objective=SC), inputs, device, repeats)
        bare = seconds(products, inputs, device, repeats)
        print(f"growth {name}: sc {time:.4f} s, products {bare:.4f} s, ratio {time / bare:.3f}", flush=True)
        figures |= {f"growth.{name}.sc_s": time, f"growth.{name}.sc_over_products": time / bare}
        del inputs
    return figures


def compare(size: Size, device: str, repeats: int) -> dict[str, float]:
    """Seconds of every case, its extra bytes on CUDA, and the ratios."""
    inputs = make_inputs(size, device, CANDIDATES)
    cases = {
        "products": products,
        "grpo": partial(ours, objective=GRPO),
        "sc": partial(ours, objective=SC),
        "naive": naive,
    }
    if device == "cuda" and importlib.util.find_spec("liger_kernel"):
        cases["liger"] = liger
    figures: dict[str, float] = {}
    for name, case in cases.items():
        figures[f"{name}_s"] = seconds(case, inputs, device, repeats)
        if device == "cuda" and name != "products":
            figures[f"{name}_extra_bytes"] = extra_bytes(case, inputs)
        print(name, {key: value for key, value in figures.items() if key.startswith(f"{name}_")}, flush=True)
    for other in ("products", "grpo", "naive", "liger"):
        if f"{other}_s" in figures:
            figures[f"sc_over_{other}"] = figures["sc_s"] / figures[f"{other}_s"]
    if device == "cuda":
        figures["sc_extra_over_naive_extra"] = figures["sc_extra_bytes"] / figures["naive_extra_bytes"]
    return figures


def main() -> None:
    arguments = parse_args(__doc__)
    device, full_gpu = arguments.device, arguments.device == "cuda" and not arguments.quick
    size = SIZES[device, arguments.quick]
    repeats = 30 if full_gpu else 3
    print(f"T = {size.tokens}, V = {size.vocab}, D = {size.width}, K = {CANDIDATES}, {size.dtype}", flush=True)
    figures = compare(size, device, repeats)
    # The goals are stated for the full size on a GPU; elsewhere the same numbers are figures.
    goals = {name: (figures.pop(name), limit) for name, limit in GOALS.items() if full_gpu and name in figures}
    ratios = corrections(size, device, repeats)
    goals |= {name: (ratio, CORRECTION_LIMIT) for name, ratio in ratios.items() if full_gpu}
    figures |= {} if full_gpu else ratios
    figures |= growth(size, device, max(3, repeats // 3))
    report("objective", device, figures, goals)


if __name__ == "__main__":
    main()
