"""Slots (where rollouts are being decoded) and records (what was sampled), as tensors on the engine's device."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Slots:
    """B places for rollouts. An empty slot computes along and writes to the spare record."""

    token: Tensor  # (B,) int64, the token to feed next
    position: Tensor  # (B,) int64, its position in the sequence
    count: Tensor  # (B,) int64, tokens generated so far
    record: Tensor  # (B,) int64, row of the records
    active: Tensor  # (B,) bool

    @classmethod
    def empty(cls, batch: int, device: torch.device) -> "Slots":
        def integers() -> Tensor:
            return torch.zeros(batch, dtype=torch.int64, device=device)

        active = torch.zeros(batch, dtype=torch.bool, device=device)
        return cls(token=integers(), position=integers(), count=integers(), record=integers(), active=active)

    def tensors(self) -> tuple[Tensor, ...]:
        return self.token, self.position, self.count, self.record, self.active

    def first_rows(self, rows: int) -> "Slots":
        """A view of the first rows."""
        return Slots(*(tensor[:rows] for tensor in self.tensors()))

    def move(self, target: Tensor, source: Tensor, spare: int) -> None:
        """Hands the rollouts of slots `source` on to slots `target` and empties `source`."""
        for tensor in self.tensors():
            tensor[target] = tensor[source]
        self.active[source] = False
        self.record[source] = spare


@dataclass(frozen=True)
class Records:
    """What N rollouts of up to R tokens sampled; row N is the spare that empty slots write to."""

    uniforms: Tensor  # (N + 1, R) float64
    tokens: Tensor  # (N + 1, R) int32
    logprobs: Tensor  # (N + 1, R) float32
    lengths: Tensor  # (N + 1,) int64
    candidate_ids: Tensor  # (N + 1, R, K) int32
    candidate_logprobs: Tensor  # (N + 1, R, K) float32
    routes: Tensor  # (N + 1, P + R, layers, top-k) int16, the experts of each fed token; no layers when not recorded
    temperature: Tensor  # () float32
    limit: Tensor  # () int64, tokens a rollout may have
    stop: Tensor  # (V,) bool

    @classmethod
    def empty(
        cls, capacity: int, length: int, candidates: int, vocab: int, routes: tuple[int, int, int], device: torch.device
    ) -> "Records":
        def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        rows = capacity + 1
        return cls(
            uniforms=zeros(rows, length, dtype=torch.float64),
            tokens=zeros(rows, length, dtype=torch.int32),
            logprobs=zeros(rows, length, dtype=torch.float32),
            lengths=zeros(rows, dtype=torch.int64),
            candidate_ids=zeros(rows, length, candidates, dtype=torch.int32),
            candidate_logprobs=zeros(rows, length, candidates, dtype=torch.float32),
            routes=zeros(rows, *routes, dtype=torch.int16),
            temperature=torch.ones((), device=device),
            limit=zeros(dtype=torch.int64),
            stop=zeros(vocab, dtype=torch.bool),
        )

    @property
    def capacity(self) -> int:
        return self.tokens.shape[0] - 1

    @property
    def candidates(self) -> int:
        return self.candidate_ids.shape[2]
