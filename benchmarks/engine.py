"""The local engine against transformers' generate, and what recording 128 candidates a token costs.

Same prompts, lengths and random weights for all, one process. Full size: the shapes of SmolLM2-135M, batch 16 on a CPU
and 64 on a GPU. --quick: a Qwen3.5 of 1 M parameters. The engine runs W8A8 with the INT4 KV cache unless said.
"""

import functools
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch
from _common import parse_args, report
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, Qwen3_5TextConfig

from score_centering.precision import requantise
from score_centering.precision.int8 import FORMAT as INT8
from score_centering.rollout import LocalEngine, Sampling

CANDIDATES = 128
CAPTURE_LIMIT = 0.05
SMOLLM2 = LlamaConfig(
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_hidden_layers=30,
    num_attention_heads=9,
    num_key_value_heads=3,
    rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
    tie_word_embeddings=True,
)
TINY = Qwen3_5TextConfig(
    vocab_size=512,
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=32,
    linear_value_head_dim=32,
    tie_word_embeddings=True,
)
W8A8 = {"quantization_config": INT8.quantization_config(["Linear"], ["lm_head", "re:.*in_proj_[ab]$"])}


def make_engine(config: PreTrainedConfig, model: torch.nn.Module, low: bool, sizes: dict, device: str) -> LocalEngine:
    engine = LocalEngine(
        config,
        quantised_config=W8A8 if low else None,
        kv_cache="int4_per_token_head" if low else "auto",
        max_batch=sizes["batch"],
        max_prompt_length=sizes["prompt"],
        max_response_length=sizes["response"],
        device=device,
    )
    engine.sync(requantise({name: p.detach() for name, p in model.named_parameters()}, engine.listed), step=0)
    return engine


def transformers_generate(model: torch.nn.Module, prompts: np.ndarray, response: int, device: str) -> None:
    with torch.inference_mode():
        model.generate(
            torch.from_numpy(prompts).to(device),
            attention_mask=torch.ones(prompts.shape, dtype=torch.int64, device=device),
            do_sample=True,
            top_k=0,
            top_p=1.0,
            min_new_tokens=response,
            max_new_tokens=response,
            pad_token_id=0,
        )
    if device == "cuda":
        torch.cuda.synchronize()


def alternate(candidates: dict[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
    """Seconds of each candidate, taken in turn so that a disturbance meets all of them; one warm-up round."""
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    for round_number in range(repeats + 1):
        for name, run in candidates.items():
            start = time.perf_counter()
            run()
            if round_number:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def main() -> None:
    arguments = parse_args(__doc__)
    device = arguments.device
    config = TINY if arguments.quick else SMOLLM2
    if device == "cuda":
        sizes = {"batch": 64, "prompt": 64, "response": 256}
    else:
        sizes = {"batch": 16, "prompt": 32, "response": 24}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval().to(device)
    prompts = np.random.default_rng(0).integers(1, config.vocab_size, (sizes["batch"], sizes["prompt"]))
    sampling = Sampling(temperature=1.0, max_tokens=sizes["response"], greedy=False, stop_token_ids=())
    low, exact = (make_engine(config, model, mode, sizes, device) for mode in (True, False))

    def engine_run(engine: LocalEngine, top_logprobs: int) -> Callable[[], object]:
        return functools.partial(engine.generate, prompts.tolist(), 1, sampling, 0, top_logprobs)

    candidates = {
        "engine": engine_run(low, 0),
        f"engine, K = {CANDIDATES}": engine_run(low, CANDIDATES),
        "engine in BF16": engine_run(exact, 0),
    }
    seconds = alternate(candidates, repeats=9 if device == "cuda" or arguments.quick else 4)
    ours = {"transformers in BF16": functools.partial(transformers_generate, model, prompts, sizes["response"], device)}
    seconds |= alternate(ours, repeats=1)
    if device == "cpu":
        single = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        run = functools.partial(transformers_generate, single, prompts, sizes["response"], device)
        seconds |= alternate({"transformers in FP32": run}, repeats=2)
    best = {name: min(values) for name, values in seconds.items()}
    tokens = sizes["batch"] * sizes["response"]
    figures = {f"{name}: seconds": value for name, value in best.items()}
    figures |= {f"{name}: tokens/s": tokens / value for name, value in best.items()}
    figures |= {f"engine: MB of {name}": size / 1e6 for name, size in low.nbytes().items()}
    figures |= {f"engine in BF16: MB of {name}": size / 1e6 for name, size in exact.nbytes().items()}
    if device == "cpu":
        figures["engine against transformers in FP32: speed"] = best["transformers in FP32"] / best["engine"]
    pairs = zip(seconds[f"engine, K = {CANDIDATES}"], seconds["engine"], strict=True)
    goals = {
        "engine against transformers in BF16: speed": (best["transformers in BF16"] / best["engine"], 1.0, "at least"),
        f"cost of K = {CANDIDATES} against K = 0": (statistics.median(a / b for a, b in pairs) - 1, CAPTURE_LIMIT),
    }
    report("engine", device, figures, goals)


if __name__ == "__main__":
    main()
