"""The cost of recording the K most probable tokens in vLLM: tokens/s without log-probs, recorded, as flat lists.

Random weights of two shapes, both W8A8 with an INT4 KV cache: transformers' default Qwen3.5 text model (the 9 B family)
and SmolLM2-135M. K = 0 is what GRPO asks for, the sampled token's log-prob. One engine a model answers the same
requests in every way, way after way, round after round; our records and vLLM's flat lists of the same seeds are
compared value by value. Needs a GPU; `--quick` leaves the 9 B out.
"""

import json
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from _common import Goal, median_seconds, parse_args, report
from transformers import LlamaConfig, PretrainedConfig, Qwen3_5TextConfig

from score_centering.rollout import Rollout, Sampling
from score_centering.rollout.candidates import round_logprobs
from score_centering.rollout.engine import sample_indices
from score_centering.rollout.streams import streams
from score_centering.rollout.vllm import VllmEngine, request_seed
from vllm_models import W8A8, flat_answers

LIMIT = 0.05
PROMPT, K = 32, (0, 32, 128)


def small() -> PretrainedConfig:
    return LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, tie_word_embeddings=True, architectures=["LlamaForCausalLM"], dtype="bfloat16",
    )  # fmt: skip


def nine_b() -> PretrainedConfig:
    return Qwen3_5TextConfig(architectures=["Qwen3_5ForCausalLM"], dtype="bfloat16")


def start(config: PretrainedConfig, folder: Path, batch: int, tokens: int) -> VllmEngine:
    config.save_pretrained(folder)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": W8A8}))
    engine = VllmEngine(
        folder,
        kv_cache="int4_per_token_head",
        device="cuda",
        max_batch=batch,
        max_prompt_length=PROMPT,
        max_response_length=tokens,
        max_logprobs=max(K),
        load_format="dummy",
    )
    engine.sync({}, 0)
    return engine


def flat(engine: VllmEngine, prompts: list[list[int]], sampling: Sampling, seed: int, top: int | None) -> list:
    """`flat_answers` to the requests of `engine.generate`."""
    owner = np.arange(len(prompts))
    seeds = [request_seed(number) for number in streams(seed, owner, sample_indices(owner)).tolist()]
    return flat_answers(engine, prompts, seeds, sampling, top)


def different(rollouts: list[Rollout], lists: list) -> int:
    """Values of the records that are not those of the flat lists."""
    count = 0
    for rollout, (ids, logprobs) in zip(rollouts, lists, strict=True):
        logprobs = np.minimum(logprobs, 0)
        count += int((rollout.token_ids != ids[:, 0]).sum() + (rollout.candidate_ids != ids[:, 1:]).sum())
        count += int((rollout.logprobs != logprobs[:, 0]).sum())
        count += int((rollout.candidate_logprobs != round_logprobs(logprobs[:, 1:])).sum())
    return count


def measure(engine: VllmEngine, vocabulary: int, batch: int, tokens: int, rounds: int) -> tuple[dict[str, float], int]:
    """Median tokens a second of each way, and how many recorded values differ."""
    prompts = np.random.default_rng(0).integers(3, vocabulary, (batch, PROMPT)).tolist()
    sampling = Sampling(1.0, tokens, False, ())
    top = max(K)
    ways = {"none": lambda seed: flat(engine, prompts, sampling, seed, None)}
    ways |= {f"k{k}": lambda seed, k=k: engine.generate(prompts, 1, sampling, seed, k) for k in K}
    ways["flat"] = lambda seed: flat(engine, prompts, sampling, seed, top)
    unlike = different(ways[f"k{top}"](0), ways["flat"](0))
    rates: dict[str, list[float]] = {name: [] for name in ways}
    for round_number in range(rounds):
        for name, run in ways.items():
            begun = time.perf_counter()
            run(round_number)
            rates[name].append(batch * tokens / (time.perf_counter() - begun))
    return {name: statistics.median(values) for name, values in rates.items()}, unlike


def top_k_seconds(batch: int, vocabulary: int) -> float:
    """Time of the one operation that no way of recording avoids."""
    logprobs = torch.randn(batch, vocabulary, device="cuda").log_softmax(-1)
    return median_seconds(lambda: logprobs.topk(max(K)), "cuda", 20)


def main() -> None:
    arguments = parse_args(__doc__)
    device = arguments.device
    if device == "cpu":
        raise SystemExit("error: benchmarks/capture.py --device: cpu, allowed is cuda: it measures vLLM's CUDA engine")
    models = {"smollm2_135m": small} if arguments.quick else {"qwen3_5_9b": nine_b, "smollm2_135m": small}
    batches, tokens, rounds = ((64,), 32, 3) if arguments.quick else ((64, 256), 128, 3)
    figures: dict[str, float] = {}
    goals: dict[str, Goal] = {}
    for model, make in models.items():
        config = make()
        with tempfile.TemporaryDirectory() as folder:
            engine = start(config, Path(folder), max(batches), tokens)
            for batch in batches:
                rates, unlike = measure(engine, config.vocab_size, batch, tokens, rounds)
                name = f"{model}.batch{batch}"
                figures |= {f"{name}.{way}_tokens_per_s": rate for way, rate in rates.items()}
                figures[f"{name}.top_k_s"] = top_k_seconds(batch, config.vocab_size)
                figures[f"{name}.flat_cost"] = 1 - rates["flat"] / rates["k0"]
                goals[f"{name}.cost_of_k128"] = (1 - rates[f"k{max(K)}"] / rates["k0"], LIMIT)
                goals[f"{name}.values_unlike_flat"] = (unlike, 0)
                print(name, {way: round(rate) for way, rate in rates.items()}, f"unlike flat: {unlike}", flush=True)
            engine.close()
    report("capture", device, figures, goals)


if __name__ == "__main__":
    main()
