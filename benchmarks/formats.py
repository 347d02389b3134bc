"""Every number format and KV cache: how far an engine's rollouts are from the emulation of it, and from BF16.

A random Llama and a random Qwen3.5, the same prompts for all; SC_FORMATS_MODEL=FOLDER takes the model of a folder in
the Llama's place. Without vLLM the local engine alone is measured; with it (SC_FORMATS_ENGINE=vllm, CUDA) vLLM's, which
logs the kernel that it chose, each of its engines in a process of its own. A format that this GPU has no kernel for is
one line, and no figure. Numbers are |Δlog p| of sampled tokens in nats. --quick: fewer rollouts.
"""

import json
import os
import tempfile
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import torch
from _common import parse_args, report
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, PreTrainedModel, Qwen3_5TextConfig

from score_centering.precision import listed_linears, requantise
from score_centering.precision.bf16 import install_cpu_kernels
from score_centering.precision.registry import CACHES, FORMATS, UNQUANTISED_PRECISION, Precision, format_of
from score_centering.rollout import Sampling
from score_centering.rollout.make_engine import EngineOptions, make_engine
from score_centering.settings import UserError
from score_centering.validation import gaps, trainer_forward
from score_centering.validation.measure import NOT_QUANTISED, Quantised, emulation

VOCABULARY, RESPONSE, AGREEMENT = 512, 24, 1.0
IGNORE = ["lm_head", "re:.*in_proj_[ab]$"]
SHAPE = {
    "vocab_size": VOCABULARY, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "initializer_range": 0.08,
    "max_position_embeddings": 256, "tie_word_embeddings": True,
}  # fmt: skip
MODELS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**SHAPE, architectures=["LlamaForCausalLM"]),
    "qwen3.5": Qwen3_5TextConfig(
        **SHAPE, layer_types=["linear_attention", "full_attention"], linear_num_key_heads=2, linear_num_value_heads=4,
        linear_key_head_dim=64, linear_value_head_dim=64, architectures=["Qwen3_5ForCausalLM"],
    ),
}  # fmt: skip


def load(label: str, device: str) -> PreTrainedModel:
    """The model under a label of `labels`, in BF16."""
    torch.manual_seed(0)
    if label in MODELS:
        model = AutoModelForCausalLM.from_config(MODELS[label], dtype=torch.bfloat16)
    else:
        model = AutoModelForCausalLM.from_pretrained(os.environ["SC_FORMATS_MODEL"], dtype=torch.bfloat16)
    if device == "cpu":
        install_cpu_kernels(model)
    return model.to(device).eval()


def labels() -> list[str]:
    folder = os.environ.get("SC_FORMATS_MODEL")
    return [Path(folder).name, "qwen3.5"] if folder else list(MODELS)


def distances(label: str, precision: Precision, engine_name: str, device: str, rollouts: int) -> tuple[float, float]:
    """Mean |Δlog p| of an engine's sampled tokens to the emulation of its precision, and to the BF16 forward."""
    model = load(label, device)
    config = model.config
    weights = {name: value.detach() for name, value in model.named_parameters()}
    with tempfile.TemporaryDirectory() as name:
        folder, quantised, path = Path(name), NOT_QUANTISED, None
        content = config.to_dict()
        if precision.quantization is not None:
            used = format_of(precision.quantization)
            content |= {"quantization_config": used.quantization_config(["Linear"], IGNORE)}
            listed = listed_linears(content, model)
            weights = requantise(weights, listed)
            quantised, path = Quantised(weights, listed), folder / "config.json"
        (folder / "config.json").write_text(json.dumps(content))
        options = EngineOptions(engine_name, precision, device, 64, 16, RESPONSE)
        engine = make_engine(options, config, folder, path)
        engine.sync(weights, 0)
        prompts = [np.random.default_rng(i).integers(0, config.vocab_size, 12).tolist() for i in range(rollouts // 4)]
        made = engine.generate(prompts, 4, Sampling(1.0, RESPONSE, False, ()), 0, 1)
        engine.close()
    found = []
    for checkpoint, computed in ((quantised, precision), (NOT_QUANTISED, UNQUANTISED_PRECISION)):
        with emulation(model, checkpoint, computed):
            scores = trainer_forward.score(model, made, 1.0, 64, device)
        found.append(gaps.sampled_gaps(scores.log_p, scores.log_q)["abs_logprob_gap_mean"])
    return found[0], found[1]


def measured(label: str, precision: Precision, engine_name: str, device: str, rollouts: int) -> tuple[float, float]:
    """`distances`; vLLM's in a fresh process, since a second engine with other weights can't capture its graphs."""
    if engine_name == "local":
        return distances(label, precision, engine_name, device, rollouts)
    with ProcessPoolExecutor(1, get_context("spawn")) as process:
        return process.submit(distances, label, precision, engine_name, device, rollouts).result()


def main() -> None:
    arguments = parse_args(__doc__)
    device, engine_name = arguments.device, os.environ.get("SC_FORMATS_ENGINE", "local")
    precisions = [UNQUANTISED_PRECISION, *(Precision(name, "auto") for name in FORMATS)]
    precisions += [Precision(None, name) for name in CACHES if name != "auto"]
    figures: dict[str, float] = {}
    goals = {}
    rollouts = 32 if arguments.quick else 256
    for label in labels():
        for precision in precisions:
            try:
                emulated, bf16 = measured(label, precision, engine_name, device, rollouts)
            except UserError as error:
                print(f"{label}, {precision.label}: {error}", flush=True)
                continue
            name = f"{label}, {precision.label}"
            print(f"{name}: {emulated:.4f} to its emulation, {bf16:.4f} to BF16", flush=True)
            figures |= {f"{name}: to its emulation": emulated, f"{name}: to BF16": bf16}
            if precision.quantization is not None:
                goals[f"{name}: emulation over BF16"] = (emulated / bf16, AGREEMENT)
    report("formats", device, figures, goals)


if __name__ == "__main__":
    main()
