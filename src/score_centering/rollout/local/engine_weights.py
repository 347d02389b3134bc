"""The engine's weights: listed linears as their number format holds them, BF16 for everything else, filled in place.

Linears that read the same input are stored as one matrix (rows concatenated), so they cost one quantisation of the
activation and one product. Every output channel has its own scale, so this changes no number.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from score_centering.precision.bf16_format import FORMAT as BF16
from score_centering.precision.format import Format, Kind
from score_centering.rollout.local.architecture import Architecture
from score_centering.settings import UserError


@dataclass(frozen=True)
class Matrix:
    """Linears of one number format that read the same input, as one: values (O, I) and, in some formats, scale (O, 1)
    float32, as `Format.hold` gives them."""

    format: Format
    values: Tensor
    scale: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        return self.format.multiply(x, self.values, self.scale)

    def rows(self, part: slice) -> "Matrix":
        """A view of some output features."""
        return Matrix(self.format, self.values[part], None if self.scale is None else self.scale[part])


class Projection:
    """Linears with the same input: x (N, I) bfloat16 → (N, O of all of them in the order of their names) bfloat16.

    bias: (O of all of them,) bfloat16, added in bfloat16.
    """

    def __init__(self, matrices: Sequence[Matrix], bias: Tensor | None = None):
        self.matrices, self.bias = matrices, bias

    def __call__(self, x: Tensor) -> Tensor:
        made = [matrix(x) for matrix in self.matrices]
        out = made[0] if len(made) == 1 else torch.cat(made, dim=-1)
        return out if self.bias is None else out + self.bias


@dataclass(frozen=True)
class AttentionWeights:
    qkv: Projection
    out: Projection
    qk_norm: Tensor | None  # (heads + KV heads, D): the norm's weight for each query and key head


@dataclass(frozen=True)
class LinearAttentionWeights:
    qkvz: Projection
    beta_decay: Projection
    out: Projection
    conv: Tensor  # (W, C) float32
    norm: Tensor  # (Dv,) bfloat16
    decay_rate: Tensor  # (Hv,) float32: −exp(A_log)
    decay_bias: Tensor  # (Hv,) float32: dt_bias


@dataclass(frozen=True)
class MlpWeights:
    gate_up: Projection
    down: Projection


@dataclass(frozen=True)
class ExpertWeights:
    """A mixture of E experts of size I; their matrices are BF16 whatever the linears are."""

    router: Projection  # (E, hidden)
    gate_up: Matrix  # (E · 2 · I, hidden)
    down: Tensor  # (E, hidden, I), stored as a BF16 matrix is
    shared: MlpWeights
    shared_gate: Projection  # (1, hidden)


@dataclass(frozen=True)
class LayerWeights:
    mixer: AttentionWeights | LinearAttentionWeights
    mlp: MlpWeights | ExpertWeights
    norm_in: Tensor  # (hidden,): 1 + w in float32 for Qwen3.5, w in bfloat16 for Llama
    norm_mid: Tensor


class Weights:
    """All weights of a model and the table through which `sync` fills them."""

    def __init__(
        self, architecture: Architecture, meta_model: nn.Module, listed: Mapping[str, Format], device: torch.device
    ):
        self.device = device
        self._shapes = {name: tuple(parameter.shape) for name, parameter in meta_model.named_parameters()}
        self._listed = listed
        self._linears: dict[str, Matrix] = {}  # layer → where its values and scale go
        self._targets: dict[str, Tensor] = {}  # any other parameter → where it goes
        self._derived: list[tuple[Tensor, Callable[[], Tensor]]] = []  # computed from targets after every fill
        self._family = architecture.family
        self.embedding = self._matrix(["model.embed_tokens"]).values
        tied = "lm_head.weight" not in self._shapes
        self.lm_head = Matrix(BF16, self.embedding) if tied else self._matrix(["lm_head"])
        self._ignored = {"lm_head.weight"} if tied else set()
        self.norm_out = self._norm("model.norm.weight")
        self.layers = [self._layer(architecture, i, kind) for i, kind in enumerate(architecture.layer_kinds)]
        self._kinds = {name: Kind(tuple(target.shape), torch.bfloat16) for name, target in self._targets.items()}
        for layer, matrix in self._linears.items():
            stored = matrix.format.stored(*self._shapes[f"{layer}.weight"])
            self._kinds |= {f"{layer}.{part}": kind for part, kind in stored.items()}
        unused = self._shapes.keys() - self._targets.keys() - {f"{layer}.weight" for layer in self._linears}
        if unused:
            raise UserError(f"local engine: it has no use for parameter {min(unused)!r} of this model")

    def _vector(self, name: str) -> Tensor:
        self._targets[name] = torch.zeros(self._shapes[name], dtype=torch.bfloat16, device=self.device)
        return self._targets[name]

    def _derive(self, compute: Callable[[], Tensor]) -> Tensor:
        target = compute()
        self._derived.append((target, compute))
        return target

    def _norm(self, name: str) -> Tensor:
        stored = self._vector(name)
        offset = self._family.norm_offset
        return self._derive(lambda: offset + stored.float()) if offset else stored

    def _matrix(self, names: Sequence[str]) -> Matrix:
        """One matrix for linears that all have the same format."""
        used = self._listed.get(names[0], BF16)
        rows = [self._shapes[f"{name}.weight"][0] for name in names]
        shape = (sum(rows), self._shapes[f"{names[0]}.weight"][1])
        values = torch.zeros(shape, dtype=used.held_dtype(self.device), device=self.device)
        scale = torch.zeros(shape[0], 1, dtype=torch.float32, device=self.device) if used.has_scale else None
        whole, start = Matrix(used, values, scale), 0
        for name, count in zip(names, rows, strict=True):
            self._linears[name] = whole.rows(slice(start, start + count))
            start += count
        return whole

    def _projection(self, prefix: str, *names: str, with_bias: bool = False) -> Projection:
        """Neighbours of the same number format share a matrix."""
        bias = self._bias([f"{prefix}.{name}" for name in names]) if with_bias else None
        runs: list[list[str]] = []
        for name in (f"{prefix}.{name}" for name in names):
            if runs and self._listed.get(name) is self._listed.get(runs[-1][0]):
                runs[-1].append(name)
            else:
                runs.append([name])
        return Projection([self._matrix(run) for run in runs], bias)

    def _bias(self, names: Sequence[str]) -> Tensor:
        """The biases of linears, one after the other."""
        counts = [self._shapes[f"{name}.bias"][0] for name in names]
        bias = torch.zeros(sum(counts), dtype=torch.bfloat16, device=self.device)
        self._targets |= {f"{name}.bias": part for name, part in zip(names, bias.split(counts), strict=True)}
        return bias

    def _layer(self, architecture: Architecture, index: int, kind: str) -> LayerWeights:
        prefix = f"model.layers.{index}"
        if kind == "full_attention":
            mixer = self._attention(architecture, f"{prefix}.self_attn")
        else:
            mixer = self._linear_attention(f"{prefix}.linear_attn")
        return LayerWeights(
            mixer=mixer,
            mlp=self._mlp(f"{prefix}.mlp") if architecture.experts is None else self._experts(f"{prefix}.mlp"),
            norm_in=self._norm(f"{prefix}.input_layernorm.weight"),
            norm_mid=self._norm(f"{prefix}.post_attention_layernorm.weight"),
        )

    def _mlp(self, prefix: str) -> MlpWeights:
        return MlpWeights(
            gate_up=self._projection(prefix, "gate_proj", "up_proj"), down=self._projection(prefix, "down_proj")
        )

    def _experts(self, prefix: str) -> ExpertWeights:
        gate_up, down = (self._stack(f"{prefix}.experts.{name}") for name in ("gate_up_proj", "down_proj"))
        return ExpertWeights(
            router=self._projection(prefix, "gate"),
            gate_up=Matrix(BF16, gate_up.flatten(0, 1)),
            down=down,
            shared=self._mlp(f"{prefix}.shared_expert"),
            shared_gate=self._projection(prefix, "shared_expert_gate"),
        )

    def _stack(self, name: str) -> Tensor:
        """The matrices of all experts, (E, O, I)."""
        dtype = BF16.held_dtype(self.device)
        self._targets[name] = torch.zeros(self._shapes[name], dtype=dtype, device=self.device)
        return self._targets[name]

    def _attention(self, architecture: Architecture, prefix: str) -> AttentionWeights:
        qk_norm = None
        if self._family.qk_norm:
            q_norm, k_norm = self._norm(f"{prefix}.q_norm.weight"), self._norm(f"{prefix}.k_norm.weight")
            qk_norm = self._derive(
                lambda: torch.cat([q_norm.expand(architecture.heads, -1), k_norm.expand(architecture.kv_heads, -1)])
            )
        return AttentionWeights(
            qkv=self._projection(prefix, "q_proj", "k_proj", "v_proj", with_bias=self._family.qkv_bias),
            out=self._projection(prefix, "o_proj"),
            qk_norm=qk_norm,
        )

    def _linear_attention(self, prefix: str) -> LinearAttentionWeights:
        conv = self._vector(f"{prefix}.conv1d.weight")
        decay_log, decay_bias = self._vector(f"{prefix}.A_log"), self._vector(f"{prefix}.dt_bias")
        return LinearAttentionWeights(
            qkvz=self._projection(prefix, "in_proj_qkv", "in_proj_z"),
            beta_decay=self._projection(prefix, "in_proj_b", "in_proj_a"),
            out=self._projection(prefix, "out_proj"),
            conv=self._derive(lambda: conv.squeeze(1).t().float().contiguous()),
            norm=self._vector(f"{prefix}.norm.weight"),
            decay_rate=self._derive(lambda: -decay_log.float().exp()),
            decay_bias=self._derive(lambda: decay_bias.float()),
        )

    def fill(self, weights: Mapping[str, Tensor]) -> None:
        """Copies a checkpoint into the engine's own memory; addresses don't change, so captured graphs stay valid."""
        missing = sorted(self._kinds.keys() - weights.keys())
        if missing:
            raise UserError(f"local engine: {missing[0]!r} is missing from the weights ({len(missing)} in all)")
        unknown = sorted(weights.keys() - self._kinds.keys() - self._ignored)
        if unknown:
            raise UserError(f"local engine: the weights hold {unknown[0]!r}, which this engine does not have")
        for name, kind in self._kinds.items():
            source = weights[name]
            if source.dtype != kind.dtype or tuple(source.shape) != kind.shape:
                raise UserError(
                    f"local engine: {name} is {source.dtype} {tuple(source.shape)}, must be {kind.dtype} {kind.shape}"
                )
        for name, target in self._targets.items():
            target.copy_(weights[name])
        for layer, matrix in self._linears.items():
            stored = {part: weights[f"{layer}.{part}"] for part in matrix.format.parts}
            values, scale = matrix.format.hold(stored)
            matrix.values.copy_(values)
            if matrix.scale is not None:
                matrix.scale.copy_(scale)
        for target, compute in self._derived:
            target.copy_(compute())

    def nbytes(self) -> dict[str, int]:
        """Bytes held, by what holds them."""
        total = {"linear_values": 0, "linear_scales": 0, "other_weights": 0}
        for layer, matrix in self._linears.items():
            total["linear_values" if layer in self._listed else "other_weights"] += matrix.values.nbytes
            total["linear_scales"] += 0 if matrix.scale is None else matrix.scale.nbytes
        total["other_weights"] += sum(target.nbytes for target in self._targets.values())
        return total
