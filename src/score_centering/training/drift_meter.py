"""The drift meter: what an uncentered update holds beside its signal, measured as a gradient of the weights.

At a step that is due, from the weights before its first update and the rows, advantages and loss weights of that
update:

    g = ∇_θ Σ_t w_t·A_t·Σ_{v∈H} sg(c_v)·log p_v

with the c_v of the arm's own weight f (`objectives.terms`), which are q_v − ρ·p_v for f = 1. It is what score centering
subtracts, so an arm without centering moves its weights along −g. Three numbers are made of it:

    drift_norm       |g|
    drift_share      |g| / norm of the arm's own gradient of that update, before clipping
    drift_coherence  |Σ_i g_i| / Σ_i |g_i| of all measurements so far: 1/√n for n independent directions, near 1 for a
                     bias that keeps its direction

Source of the decomposition: Score Centering Stabilizes Off-policy Reinforcement Learning, arXiv 2609.20807, Section 4.
"""

import math
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

from score_centering.objectives import Objective, TokenBatch, policy_loss_from_hidden

COLUMNS = ("drift_norm", "drift_share", "drift_coherence")
DIRECTION, LENGTHS = "drift_meter.direction.", "drift_meter.lengths"


def due(step: int, freq: int) -> bool:
    """Whether `step` (numbered from 1) is measured: the first one and every `freq`-th after it; freq −1: never."""
    return freq > 0 and (step - 1) % freq == 0


class DriftSum:
    """Σ_i g_i (FP32, by parameter) and Σ_i |g_i| of the measurements so far: what a checkpoint holds of a meter.

    norm_of: the Euclidean norm over all parameters, also those parts that other ranks hold.
    """

    def __init__(self, norm_of: Callable[[Iterable[Tensor]], float]) -> None:
        self._norm_of = norm_of
        self._direction: dict[str, Tensor] = {}
        self._lengths = 0.0

    def add(self, gradient: Mapping[str, Tensor], update_norm: float) -> dict[str, float | None]:
        """The columns after one more g, FP32 by parameter; `update_norm`: of the arm's own gradient before clipping.

        None: a g that is not finite, which is left out of the sums, and a ratio to 0 or to what is not finite.
        """
        norm = self._norm_of(gradient.values())
        if not math.isfinite(norm):
            return dict.fromkeys(COLUMNS)
        for name, value in gradient.items():
            so_far = self._direction.get(name)
            self._direction[name] = value if so_far is None else so_far.to(value.device) + value
        self._lengths += norm
        values = norm, _ratio(norm, update_norm), _ratio(self._norm_of(self._direction.values()), self._lengths)
        return dict(zip(COLUMNS, values, strict=True))

    def tensors(self) -> dict[str, Tensor]:
        """For a checkpoint; empty before the first measurement."""
        if not self._direction:
            return {}
        named = {DIRECTION + name: value for name, value in self._direction.items()}
        return named | {LENGTHS: torch.tensor(self._lengths, dtype=torch.float64)}

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Set what `tensors` returned, found among all tensors of a checkpoint; none there: nothing was measured."""
        self._lengths = tensors[LENGTHS].item() if LENGTHS in tensors else 0.0
        self._direction = {
            name.removeprefix(DIRECTION): value for name, value in tensors.items() if name.startswith(DIRECTION)
        }


class DriftMeter:
    """Measures a model that this process holds whole.

    Args:
        parameters: those of the model, by name.
        objective: the arm's.
        freq: steps between measurements, −1: never.
        temperature: of sampling.
    """

    def __init__(self, parameters: Mapping[str, Tensor], objective: Objective, freq: int, temperature: float) -> None:
        self._parameters, self._objective = dict(parameters), objective
        self._freq, self._temperature = freq, temperature
        self._gradient: dict[str, Tensor] = {}
        self.sum = DriftSum(total_norm)

    def due(self, step: int) -> bool:
        return due(step, self._freq)

    def collect(self, hidden: Tensor, lm_head_weight: Tensor, batch: TokenBatch) -> None:
        """Add a micro-batch to g; the graph behind `hidden` (T, D) stays for the arm's own backward."""
        objective = self._objective.drift()
        loss = policy_loss_from_hidden(hidden, lm_head_weight, batch, objective, self._temperature).loss
        gradients = torch.autograd.grad(loss, list(self._parameters.values()), retain_graph=True, allow_unused=True)
        for name, gradient in zip(self._parameters, gradients, strict=True):
            if gradient is not None:
                so_far = self._gradient.get(name)
                self._gradient[name] = gradient.float() if so_far is None else so_far.add_(gradient)

    def finish(self, update_norm: float) -> dict[str, float | None]:
        """The columns of the collected update, whose own gradient had the norm `update_norm` before clipping."""
        gradient, self._gradient = self._gradient, {}
        return self.sum.add(gradient, update_norm)


def total_norm(values: Iterable[Tensor]) -> float:
    """Euclidean norm over all tensors."""
    return torch.nn.utils.get_total_norm(list(values), foreach=True).item()


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if 0 < whole < math.inf else None
