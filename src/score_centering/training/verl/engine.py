"""verl's FSDP engine for both devices, with what this project's numerics and resume need.

Parameters, gradients and optimiser state are FP32 and sharded; the forward runs on BF16 copies, as the local trainer's.
"""

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from verl.workers.engine import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

from score_centering.precision.bf16 import install_cpu_kernels
from score_centering.runs.torch_state import optimizer_tensors, restore_optimizer

MODEL, UPDATES = "model.", "updates"
STRATEGIES, DEVICES = ("fsdp", "fsdp2"), ("cpu", "cuda")


class Engine(FSDPEngineWithLMHead):
    """One rank's part of the model and its optimiser."""

    _updates = 0

    def _build_module(self) -> nn.Module:
        module = super()._build_module()
        if not torch.cuda.is_available():
            install_cpu_kernels(module)
        return module

    def _build_fsdp_module(self, module: nn.Module) -> nn.Module:
        module = super()._build_fsdp_module(module)
        self._autocast_dtype = torch.float32  # no autocast: FSDP hands the layers BF16 parameters already
        return module

    def optimizer_step(self) -> float:
        """One update; returns the gradient norm before clipping. A non-finite one changes no weight.

        The warm-up is the local trainer's, linear and full at update `lr_warmup_steps`; verl's own begins with 0.
        """
        self._updates += 1
        self._rate = self.optimizer_config.lr * min(1.0, self._updates / max(1, self.optimizer_config.lr_warmup_steps))
        for group in self.optimizer.param_groups:
            group["lr"] = self._rate
        return super().optimizer_step()

    def lr_scheduler_step(self) -> float:
        """The rate of the last update."""
        return self._rate

    def shard(self) -> dict[str, Tensor]:
        """This rank's part of everything that shapes the next update."""
        parameters = {MODEL + name: _local(value) for name, value in self.module.named_parameters()}
        state = {name: _local(value) for name, value in optimizer_tensors(self.optimizer).items()}
        return parameters | state | {UPDATES: torch.tensor(self._updates)}

    @torch.no_grad()
    def restore_shard(self, tensors: dict[str, Tensor]) -> None:
        """Set what `shard` returned on a rank of the same number, of as many."""
        parameters = dict(self.module.named_parameters())
        for name, parameter in parameters.items():
            _local(parameter).copy_(tensors[MODEL + name])
        state = {}
        order = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        for name, value in tensors.items():
            if name.startswith("optimizer."):
                state[name] = _like(order[int(name.split(".")[1])], value)
        restore_optimizer(self.optimizer, state)
        self._updates = int(tensors[UPDATES])


def _local(value: Tensor) -> Tensor:
    return value.to_local() if isinstance(value, DTensor) else value


def _like(parameter: Tensor, local: Tensor) -> Tensor:
    """`local` as the shard of a tensor that is split as `parameter` is; a scalar stays as it is."""
    if not isinstance(parameter, DTensor) or local.dim() == 0:
        return local
    whole = torch.zeros_like(parameter)
    whole.to_local().copy_(local)
    return whole


def register() -> None:
    """Let verl build this engine; its registry keeps the first entry of a key, so it is entered directly."""
    for strategy in STRATEGIES:
        for device in DEVICES:
            EngineRegistry._engines["language_model"][strategy][device] = Engine
