"""FP32 master weights over a BF16 model: gradients, optimiser and update in FP32, one cast to BF16 a step."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from score_centering.runs.torch_state import optimizer_tensors, restore_optimizer
from score_centering.settings.training_blocks import Optim


def learning_rate(lr: float, lr_warmup_steps: int, update: int) -> float:
    """Of `update`, numbered from 1: linear warm-up, full at update `lr_warmup_steps`."""
    return lr * min(1.0, update / max(1, lr_warmup_steps))


class MasterWeights:
    """Master copies of the parameters of `model` and their optimiser.

    A backward pass leaves BF16 gradients on the model; `collect` adds them up in FP32, `step` updates the masters and
    casts them back, so the model always holds the masters rounded once.
    """

    def __init__(self, model: nn.Module, options: Optim) -> None:
        self._options = options
        self._parameters = dict(model.named_parameters())
        self.masters = {name: value.detach().float().clone() for name, value in self._parameters.items()}
        groups = list(self.masters.values())
        if options.name == "adamw":
            self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(
                groups, lr=options.lr, betas=options.betas, eps=options.eps, weight_decay=options.weight_decay
            )
        else:
            self.optimizer = torch.optim.SGD(groups, lr=options.lr, weight_decay=options.weight_decay)

    def collect(self) -> None:
        """Move the gradients that a backward pass left on the model into the masters' FP32 sums."""
        for name, parameter in self._parameters.items():
            if parameter.grad is None:
                continue
            master = self.masters[name]
            if master.grad is None:
                master.grad = parameter.grad.float()
            else:
                master.grad.add_(parameter.grad)
            parameter.grad = None

    def clip(self, max_norm: float | None) -> float:
        """Scale the summed gradients to a norm of at most `max_norm`, None leaves them; returns the norm before."""
        gradients = [master.grad for master in self.masters.values() if master.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients, foreach=True)
        if max_norm is not None:
            torch.nn.utils.clip_grads_with_norm_(self.masters.values(), max_norm, norm, foreach=True)
        return norm.item()

    def step(self, update: int) -> float:
        """One optimiser step, numbered from 1, and the cast to BF16; returns the learning rate."""
        rate = learning_rate(self._options.lr, self._options.lr_warmup_steps, update)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.drop_gradients()
        self._cast()
        return rate

    def drop_gradients(self) -> None:
        """Forget the summed gradients."""
        self.optimizer.zero_grad(set_to_none=True)

    def tensors(self) -> dict[str, Tensor]:
        """Masters and optimiser state, for a checkpoint."""
        return {f"master.{name}": value for name, value in self.masters.items()} | optimizer_tensors(self.optimizer)

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Set what `tensors` returned."""
        for name, master in self.masters.items():
            master.copy_(tensors[f"master.{name}"])
        restore_optimizer(self.optimizer, tensors)
        self._cast()

    @torch.no_grad()
    def _cast(self) -> None:
        for name, parameter in self._parameters.items():
            parameter.copy_(self.masters[name])
