"""Will a run fit, and how long will it take? From settings and the model's config.json alone, before anything starts.

Bytes that are held for each of N parameters:

| what | local trainer | verl (FSDP2), N over the GPUs |
|---|---|---|
| weights of the forward | 2, BF16 | root and two layers at a time, BF16 |
| master weights | 4, FP32 | 4, FP32 |
| gradients | 4, FP32 sums; 2, BF16, of the running backward | 4, FP32 |
| AdamW | 8, FP32; 4 more while it steps on a GPU | 8, FP32; 4 more while it steps |

Activations are counted on a model without storage (`live_memory`). Weights, KV cache and states of the rollout engine
follow from the same shapes as the local engine's own.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from huggingface_hub import try_to_load_from_cache
from transformers import AutoConfig, PreTrainedConfig
from transformers.models.qwen3_5 import Qwen3_5TextConfig

from score_centering.model.scratch import CLASSES
from score_centering.model.sources import local_folder, package_file
from score_centering.objectives.loss import CHUNK_BYTES, one_weight_product
from score_centering.planning.live_memory import forward_bytes, pass_bytes
from score_centering.planning.throughput import DEVICES, decoding_seconds, training_flops_per_second
from score_centering.precision import listed_linears
from score_centering.precision.bf16 import install_cpu_kernels
from score_centering.precision.registry import format_of
from score_centering.rollout.local.architecture import parameter_model, read_architecture
from score_centering.rollout.local.local_engine import PREFILL_CHUNK, PREFILL_ROWS
from score_centering.rollout.local.state import State
from score_centering.runs import peak_rss_bytes
from score_centering.settings import Settings, UserError
from score_centering.settings.model_blocks import Model
from score_centering.validation import drift, trainer_forward
from score_centering.validation.stage import ENGINE_SLOTS, FORWARD_ROLLOUTS

KNOWN_SHAPE = "Qwen/Qwen3.5-9B"
MALLOC_SHARE = 0.25  # measured at two small models: what a CPU's allocator keeps of what an update frees
CUDA_CONTEXT = 1 << 30  # assumed, for each process on a GPU: context, workspaces and the allocator's rounding
META = torch.device("meta")
COUNTED_LENGTH = 1024  # a forward is linear in its tokens: counted as sequences of this length, which is faster
STATE = ("weights, FP32", "gradients, FP32", "AdamW, FP32")


@dataclass(frozen=True)
class MemoryPhase:
    """What is held at once: name → bytes."""

    name: str
    held: Mapping[str, int]

    @property
    def total(self) -> int:
        return sum(self.held.values())


@dataclass(frozen=True)
class Memory:
    """What an arm holds in each phase; `note` tells of its rollout engine."""

    phases: tuple[MemoryPhase, ...]
    note: str

    @property
    def peak(self) -> MemoryPhase:
        return max(self.phases, key=lambda phase: phase.total)


@dataclass(frozen=True)
class Hours:
    """Hours of a whole run by part, and what the figures rest on."""

    parts: Mapping[str, float]
    sources: tuple[str, ...]


def model_config(settings: Model, file: Path | None) -> tuple[PreTrainedConfig, str]:
    """The text model's configuration, and where it comes from: `file`, or the chosen source. Nothing is fetched.

    Raises:
        UserError: there is none on this machine.
    """
    if file is not None:
        if file.name != "config.json" or not file.is_file():
            raise UserError(f"--model-config: {file} is no config.json")
        return _read(file.parent), str(file)
    if settings.source == "scratch":
        scratch = settings.scratch
        config_class = getattr(transformers, CLASSES[scratch.architecture][0])
        parameters = {name: value for name, value in scratch.parameters.items() if value is not None}
        config = config_class(**parameters, vocab_size=scratch.tokenizer.vocab_size)
        return config, "model.scratch.parameters"
    if settings.source == "path":
        return _read(local_folder(settings.path)), f"{settings.path.path}/config.json"
    if settings.source == "package":
        path = package_file(settings.package)
        return AutoConfig.from_pretrained(path.parent, gguf_file=path.name), f"{path.name}'s metadata"
    hub = settings.hub
    cached = try_to_load_from_cache(hub.repo, "config.json", revision=hub.revision)
    if isinstance(cached, str):
        return _read(Path(cached).parent), cached
    if hub.repo != KNOWN_SHAPE:
        raise UserError(
            f"model.hub: config.json of {hub.repo} is not in the hub client's cache; name a file with --model-config"
        )
    return Qwen3_5TextConfig(), "transformers' Qwen3_5TextConfig, whose defaults are this model's shape"


def _read(folder: Path) -> PreTrainedConfig:
    return AutoConfig.from_pretrained(folder, local_files_only=True).get_text_config()


class Planner:
    """Plans the arms of one model on one device: a key of `DEVICES`, or "cpu"."""

    def __init__(self, config: PreTrainedConfig, device: str) -> None:
        self.config, self.device = config, device
        model = parameter_model(config)
        self.parameters = sum(parameter.numel() for parameter in model.parameters())
        self.embedding = model.get_input_embeddings().weight.numel()
        self.root = sum(value.numel() for name, value in model.named_parameters() if ".layers." not in name)
        self.process = peak_rss_bytes() if device == "cpu" else CUDA_CONTEXT  # measured in this very process
        self._passes: dict[tuple[int, int, bool], int] = {}

    @property
    def memory_bytes(self) -> int:
        if self.device == "cpu":
            return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return DEVICES[self.device].memory_bytes

    # ------------------------------------------------------------------------------------------------------- memory
    def memory(self, arm: Settings) -> Memory:
        """What one arm, given by its resolved settings, holds."""
        engine, note = self._engine(arm)
        engine = {f"rollout engine: {name}": size for name, size in engine.items()}
        return Memory(self._local(arm, engine) if arm.trainer.name == "local" else self._verl(arm, engine), note)

    def _process(self) -> dict[str, int]:
        return {"Python and its libraries" if self.device == "cpu" else "CUDA context": self.process}

    def validation(self, arms: Sequence[Settings]) -> Memory:
        """What the precision validation of these arms holds: an engine beside the model, then the trainer's forward."""
        arm = arms[0]
        n, head = self.parameters, self.config.vocab_size * self.config.hidden_size
        where = "cpu" if self.device == "cpu" else "cuda"
        quantised = {each.actor_rollout_ref.rollout.quantization: each for each in arms}
        stored = sum(self._engine_weights(each) for name, each in quantised.items() if name is not None)
        held = self._process() | {"weights, BF16": 2 * n, "quantised checkpoints": stored}
        engines = [self._engine(each, ENGINE_SLOTS) for each in arms]
        engine, note = max(engines, key=lambda found: sum(found[0].values()))
        tokens = _longest(arm) * max(1, min(FORWARD_ROLLOUTS, trainer_forward.FORWARD_TOKENS // _longest(arm)))
        model = parameter_model(self.config)
        if where == "cpu":
            install_cpu_kernels(model)
        positions = arm.precision.drift_tokens * (1 + arm.precision.rollouts)
        scoring = {
            "LM head, FP32": 4 * head,
            "forward": forward_bytes(model, -(-tokens // COUNTED_LENGTH), COUNTED_LENGTH),
            "log-probs of a chunk": trainer_forward.CHUNK_BYTES[where],
        }
        exact = {
            "LM head and its bias, FP64": 16 * head,
            "log-probs of trainer and sampler": 12 * positions * self.config.vocab_size,
            "a chunk's drift, FP64": 48 * min(positions, drift.CHUNK) * self.config.vocab_size,
        }
        phases = {"engine": {f"rollout engine: {key}": size for key, size in engine.items()}}
        phases |= {"log-probs": scoring, "exact drift": exact}
        return Memory(tuple(MemoryPhase(f"validation, {name}", held | more) for name, more in phases.items()), note)

    def _local(self, arm: Settings, engine: Mapping[str, int]) -> tuple[MemoryPhase, ...]:
        """Model, masters, optimiser and engine in one process."""
        actor, n = arm.actor_rollout_ref.actor, self.parameters
        adam = actor.optim.name == "adamw"
        held = self._process()
        held |= {"weights, BF16": 2 * n, "master weights, FP32": 4 * n, "AdamW, FP32": 8 * n * adam, **engine}
        held["weights of a stale sampler, BF16"] = 2 * n * (arm.trainer.sync_every > 1)
        if arm.trainer.clean_reward and arm.trainer.test_freq > 0:
            held["engine of the clean reward"] = self._clean_engine(arm)
        rollouts = arm.data.train_batch_size * arm.actor_rollout_ref.rollout.n
        rows = min(actor.ppo_micro_batch_size_per_gpu, rollouts // actor.mini_batches)
        several = rollouts // actor.mini_batches > rows
        backward = {
            "gradient sums, FP32": 4 * n * several,  # of the micro-batches before
            "forward and backward": self._pass(rows, _longest(arm), verl=False),
            "loss": self._loss(rows * arm.data.max_response_length),
        }
        if self.device == "cpu":
            backward["freed, but kept by the allocator"] = int(MALLOC_SHARE * sum(backward.values()))
        stepping = 0 if self.device == "cpu" or not adam else 4 * n
        step = {"gradient sums, FP32": 4 * n, "AdamW's step": stepping}
        return MemoryPhase("backward", held | backward), MemoryPhase("optimiser step", held | step)

    def _verl(self, arm: Settings, engine: Mapping[str, int]) -> tuple[MemoryPhase, ...]:
        """FSDP2 with gradient checkpointing; vLLM sleeps during the update, the local engine keeps its memory."""
        gpus = arm.trainer.nnodes * arm.trainer.n_gpus_per_node
        actor = arm.actor_rollout_ref.actor
        weights, adam = 4 * self.parameters // gpus, 8 * self.parameters // gpus
        layer = (self.parameters - self.root) // self.config.num_hidden_layers
        awake = {} if arm.actor_rollout_ref.rollout.name == "vllm" else engine
        rows, length = actor.ppo_micro_batch_size_per_gpu, _longest(arm)
        update = {
            "weights, FP32": weights,
            "gradients, FP32": weights,
            "AdamW, FP32": adam,
            "root and two layers, BF16": 2 * (self.root + 2 * layer),
            "forward and backward": self._pass(rows, length, verl=True),
            "loss": self._loss(rows * arm.data.max_response_length),
            "CUDA contexts, and the engine's graphs": 3 * CUDA_CONTEXT,
            **awake,
        }
        rollout = {
            "weights, FP32": 0 if actor.fsdp_config.param_offload else weights,
            "AdamW, FP32": 0 if actor.fsdp_config.optimizer_offload else adam,
            "CUDA contexts": 2 * CUDA_CONTEXT,
            **engine,
        }
        stepping = {"AdamW's step": weights, "CUDA contexts": 3 * CUDA_CONTEXT}
        step = {name: update[name] for name in STATE} | stepping | awake
        return MemoryPhase("update", update), MemoryPhase("optimiser step", step), MemoryPhase("rollout", rollout)

    def _pass(self, rows: int, length: int, verl: bool) -> int:
        if (rows, length, verl) not in self._passes:
            model = parameter_model(self.config)
            if verl:
                model.gradient_checkpointing_enable({"use_reentrant": False})
                model.train()
            elif self.device == "cpu":
                install_cpu_kernels(model)
            found = pass_bytes(model, rows, length, fused_delta_rule=verl, keep_gradients=not verl)
            self._passes[rows, length, verl] = found
        return self._passes[rows, length, verl]

    def _loss(self, tokens: int) -> int:
        """Buffers of one chunk of logits, and the gradients of the hidden states and the LM head."""
        vocabulary, hidden = self.config.vocab_size, self.config.hidden_size
        where = "cpu" if self.device == "cpu" else "cuda"
        rows = min(tokens, CHUNK_BYTES[where] // (6 * vocabulary))
        if where == "cpu":  # the head's operand and gradient in FP32; logits and three temporaries of a chunk
            return 2 * tokens * hidden + 10 * vocabulary * hidden + 16 * rows * vocabulary
        if one_weight_product(tokens, hidden, torch.bfloat16, torch.float32):  # all rows' gradients, then one product
            return 4 * tokens * hidden + 2 * vocabulary * hidden + (2 * tokens + 4 * rows) * vocabulary
        # the head's gradient is summed in FP32 and then rounded
        return 2 * tokens * hidden + 6 * vocabulary * hidden + 6 * rows * vocabulary

    def _engine(self, arm: Settings, slots: int | None = None) -> tuple[dict[str, int], str]:
        """What the rollout engine of `slots` sequences (max_num_seqs) holds, and a line about it."""
        rollout, architecture = arm.actor_rollout_ref.rollout, read_architecture(self.config)
        kv = rollout.engine_kwargs.vllm.kv_cache_dtype
        weights = self._engine_weights(arm)
        one = State.zeros(architecture, 1, 1, kv, torch.bfloat16, META).nbytes()
        cost = f"{one['kv_cache']:,} bytes a token, {one['linear_attention']:,} a sequence"
        if rollout.name == "vllm" and self.device != "cpu":
            rows = slots or min(rollout.max_num_seqs, arm.data.train_batch_size * rollout.n)
            wanted = rows * (_longest(arm) * one["kv_cache"] + one["linear_attention"])
            left = int(rollout.gpu_memory_utilization * self.memory_bytes) - weights
            share = f"{max(0, left) / wanted:.0%} of {rows} sequences of {_longest(arm):,} tokens"
            reserved = f"gpu_memory_utilization = {rollout.gpu_memory_utilization}"
            return {"weights": weights, "KV cache and states": max(0, left)}, f"KV cache: {cost}; {reserved} is {share}"
        state, prompts = self._states(arm, slots or rollout.max_num_seqs, kv)
        k = arm.score_centering.candidates
        rollouts = arm.data.train_batch_size * rollout.n
        return {
            "weights": weights,
            "KV cache": state["kv_cache"],
            "states of linear attention": state["linear_attention"],
            "prompts being read": sum(prompts.values()),
            "records": rollouts * arm.data.max_response_length * (12 + 8 * k),
        }, f"KV cache: {cost}"

    def _clean_engine(self, arm: Settings) -> int:
        """A local engine in BF16 for the validation prompts; see `training.local`."""
        slots = min(arm.actor_rollout_ref.rollout.max_num_seqs, arm.data.val_batch_size)
        states = (sum(held.values()) for held in self._states(arm, slots, "auto"))
        return self.parameters * (4 if self.device == "cpu" else 2) + sum(states)

    def _states(self, arm: Settings, slots: int, kv: str) -> tuple[dict[str, int], dict[str, int]]:
        """What a local engine holds for its slots, and for the prompts it reads at once."""
        architecture = read_architecture(self.config)
        chunk = min(PREFILL_CHUNK, arm.data.max_prompt_length)
        prompt = -(-arm.data.max_prompt_length // chunk) * chunk
        positions = prompt + arm.data.max_response_length
        rows = PREFILL_ROWS["cpu" if self.device == "cpu" else "cuda"]
        slots_held = State.zeros(architecture, slots, positions, kv, torch.bfloat16, META).nbytes()
        return slots_held, State.zeros(architecture, rows, prompt, kv, torch.float32, META).nbytes()

    def _engine_weights(self, arm: Settings) -> int:
        """The listed layers as vLLM stores or the local engine holds their format; the rest in BF16."""
        model, rollout = parameter_model(self.config), arm.actor_rollout_ref.rollout
        used = format_of(rollout.quantization)
        device = torch.device("cpu" if self.device == "cpu" else "cuda")
        layers: list[torch.nn.Linear] = []
        if rollout.quantization is not None:
            scheme = used.quantization_config(arm.quantization.targets, arm.quantization.ignore)
            layers = [model.get_submodule(name) for name in listed_linears({"quantization_config": scheme}, model)]
        left = self.parameters - sum(layer.weight.numel() for layer in layers)
        sizes = [(layer.out_features, layer.in_features) for layer in layers]
        if rollout.name == "vllm":
            return 2 * left + sum(kind.nbytes for size in sizes for kind in used.stored(*size).values())
        rest = left * format_of(None).held_dtype(device).itemsize
        return rest + sum(used.held_bytes(*size, device) for size in sizes)

    # -------------------------------------------------------------------------------------------------------- hours
    def hours(self, arm: Settings, tokens: tuple[int, int]) -> Hours:
        """Hours of a run whose rollouts have `tokens` of prompt and response."""
        data, rollout, trainer = arm.data, arm.actor_rollout_ref.rollout, arm.trainer
        gpus = trainer.nnodes * trainer.n_gpus_per_node if trainer.name == "verl" else 1
        rollouts = -(-data.train_batch_size * rollout.n // gpus)
        k = arm.score_centering.candidates
        bf16 = rollout.quantization is None

        def generating(sequences: int, candidates: int) -> tuple[float, str]:
            batch = min(rollout.max_num_seqs, sequences)
            step, source = decoding_seconds(rollout.name, self.device, self.parameters, batch, candidates, bf16)
            return step * tokens[1] * sequences / batch, source

        rollout_s, engine_source = generating(rollouts, k)
        validation_s, _ = generating(-(-data.val_batch_size // gpus), 0)
        passes = 6.0  # operations a parameter and token, forward and backward
        if trainer.name == "verl":  # checkpointing runs the forward again, and GRPO scores the old policy
            passes += 2.0 + 2.0 * (arm.actor_rollout_ref.actor.policy_loss == "ppo")
        flops_s, trainer_source = training_flops_per_second(self.device)
        update_s = passes * (self.parameters - self.embedding * (not self.config.tie_word_embeddings)) * rollouts
        update_s *= sum(tokens) / flops_s
        steps = trainer.total_training_steps
        validations = trainer.val_before_train + -(-steps // trainer.test_freq) if trainer.test_freq > 0 else 0
        parts = {"rollout": steps * rollout_s, "update": steps * update_s, "validation": validations * validation_s}
        sources = (f"decoding: {engine_source}", f"training: {trainer_source}")
        return Hours({name: seconds / 3600 for name, seconds in parts.items()}, sources)


def _longest(arm: Settings) -> int:
    return arm.data.max_prompt_length + arm.data.max_response_length


# --------------------------------------------------------------------------------------------------------------- text
def report(
    settings: Settings,
    arms: Mapping[str, Settings],
    model_file: Path | None,
    device: str,
    tokens: tuple[int, int],
) -> Iterator[str]:
    """Lines for a person.

    Args:
        arms: name → settings resolved for that arm.
        model_file: a config.json to read instead of the chosen source's.
        tokens: expected prompt and response tokens of a rollout.
    """
    config, source = model_config(settings.model, model_file)
    planner = Planner(config, device)
    where = DEVICES[device].name if device in DEVICES else "this machine's CPU"
    yield f"{settings.experiment} on {where}: {planner.parameters:,} parameters ({source})"
    groups: dict[str, list[str]] = {}
    memories = {arm: planner.memory(resolved) for arm, resolved in arms.items()}
    for arm, memory in memories.items():
        groups.setdefault(repr(memory), []).append(arm)
    for members in groups.values():
        yield ""
        yield f"memory of {', '.join(members)}"
        yield from _memory_lines(memories[members[0]], where, planner.memory_bytes, arms[members[0]])
    yield ""
    yield "memory of the precision validation, before every arm"
    validation = planner.validation(list(arms.values()))
    yield from _memory_lines(validation, where, planner.memory_bytes, settings)
    name, most = max((*memories.items(), ("validate", validation)), key=lambda item: item[1].peak.total)
    yield f"    the most of all stages: {_size(most.peak.total)}, in the {most.peak.name} of {name}"
    yield ""
    yield f"hours a run, rollouts of {tokens[0]:,} prompt and {tokens[1]:,} response tokens"
    sources: dict[str, None] = {}
    for arm, resolved in arms.items():
        hours = planner.hours(resolved, tokens)
        parts = "  ".join(f"{name} {value:.2f}" for name, value in hours.parts.items())
        yield f"    {arm:12} {sum(hours.parts.values()):7.2f}   {parts}"
        sources |= dict.fromkeys(hours.sources)
    yield from (f"    {source}" for source in sources)
    if device in DEVICES:
        yield f"    {where}: {DEVICES[device].source}"


def _memory_lines(memory: Memory, where: str, available: int, arm: Settings) -> Iterator[str]:
    for phase in memory.phases:
        yield f"    {phase.name:46} {_size(phase.total):>10}"
        yield from (f"        {name:42} {_size(size):>10}" for name, size in phase.held.items() if size)
    yield f"    {memory.note}"
    yield f"    {verdict(memory, where, available, arm)}"


def verdict(memory: Memory, where: str, available: int, arm: Settings) -> str:
    """Fits, with how much is left; or does not, and what alone is too much."""
    peak = memory.peak
    if peak.total <= available:
        return f"fits {where}: at most {_size(peak.total)} of {_size(available)}, in the {peak.name}"
    reason = f"does not fit {where}: {_size(peak.total)} of {_size(available)}, in the {peak.name}"
    if arm.trainer.name == "verl" and STATE[0] in memory.phases[0].held:
        state = sum(memory.phases[0].held[name] for name in STATE)
        reason += (
            f"; FP32 weights, gradients and AdamW alone are {_size(state)}. It takes more GPUs, or FSDP2's CPU offload "
            "policy: param_offload and optimizer_offload bring both back for the update"
        )
    return reason


def _size(count: float) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"
