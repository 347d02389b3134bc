"""Settings of a training run; names below `data`, `algorithm`, `actor_rollout_ref` and `trainer` are verl's."""

from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from score_centering.precision.registry import CACHES, FORMATS, Precision
from score_centering.settings.block import (
    Block,
    Frequency,
    NonNegative,
    NonNegativeFloat,
    Positive,
    PositiveFloat,
    Share,
)
from score_centering.settings.registries import weight_names


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
