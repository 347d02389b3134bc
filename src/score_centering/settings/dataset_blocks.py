"""Settings of the problems and of how they are asked."""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from score_centering.settings.block import Block, Positive, Share, require_chosen


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
        require_chosen(self, "dataset")
        return self


class PromptSettings(Block):
    instruction: str = Field(description="appended to the problem, after a line break, in the user message")
    enable_thinking: bool = Field(default=True, description="passed to the chat template; inert where it has no switch")
