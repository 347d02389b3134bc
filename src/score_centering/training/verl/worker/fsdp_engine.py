"""verl's FSDP engine for both devices, with what this project's numerics and resume need.

Parameters, gradients and optimiser state are FP32 and sharded; the forward runs on BF16 copies, as the local trainer's.
"""

from collections.abc import Iterable
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from verl.utils import tensordict_utils
from verl.utils.device import get_device_id
from verl.workers.engine import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

from score_centering.precision.bf16 import install_cpu_kernels
from score_centering.runs.torch_state import optimizer_tensors, restore_optimizer
from score_centering.training.drift_meter import DriftSum
from score_centering.training.masters import learning_rate
from score_centering.training.verl.worker.loss_head import (
    DRIFT,
    DRIFT_STEP,
    LOGPROBS,
    LossHead,
    PolicyLoss,
    install_loss_head,
)
from score_centering.training.verl.worker.response_tokens import response_rows

MODEL, UPDATES = "model.", "updates"
SAMPLER = "sampler."  # of a stale sampler's weights
STRATEGIES, DEVICES = ("fsdp", "fsdp2"), ("cpu", "cuda")


class FsdpEngine(FSDPEngineWithLMHead):
    """One rank's part of the model and its optimiser."""

    _updates = 0
    _measured: int | None = None

    def initialize(self) -> None:
        super().initialize()
        self.drift = DriftSum(self._norm)

    _held: dict[str, Tensor]  # this rank's part of a stale sampler's weights, BF16 on the CPU
    _own: dict[str, Tensor]  # the trained ones while those are lent to the hand-over

    def _build_module(self) -> nn.Module:
        module = super()._build_module()
        if not torch.cuda.is_available():
            install_cpu_kernels(module)
        install_loss_head(module)
        return module

    def to(self, device: str, model: bool = True, optimizer: bool = True, grad: bool = True) -> None:
        """On a CPU there is nowhere to move to; verl would collect garbage around every batch."""
        if torch.cuda.is_available():
            super().to(device, model, optimizer, grad)

    def forward_step(
        self, micro_batch: TensorDict, loss_function: PolicyLoss, forward_only: bool
    ) -> tuple[Tensor, dict[str, Any]]:
        """Loss of one micro-batch, and its value, metric sums and log-probs for verl's bookkeeping.

        Without autocast: FSDP hands the layers BF16 parameters already.
        """
        micro_batch = micro_batch.to(get_device_id())
        inputs, _ = self.prepare_model_inputs(micro_batch)
        (head,) = (module for module in self.module.modules() if isinstance(module, LossHead))
        head.expect(loss_function, micro_batch)
        self.module(**inputs, use_cache=False)
        loss, metrics = loss_function(head.result, micro_batch)
        output = {"model_output": {}, "loss": loss.detach().item(), "metrics": metrics}
        if forward_only:
            packed = micro_batch["input_ids"]
            logprobs = torch.zeros(packed.values().shape[0], device=loss.device)
            logprobs[response_rows(micro_batch)] = head.result.logprobs.float()
            output["model_output"] = {LOGPROBS: torch.nested.nested_tensor_from_jagged(logprobs, packed.offsets())}
        return loss, output

    def train_batch(self, data: TensorDict, loss_function: PolicyLoss) -> Any:
        """One update; the first one of a step that is due measures its drift before, in a pass of its own."""
        step = tensordict_utils.get_non_tensor_data(data, DRIFT_STEP, None)
        if step is None or step == self._measured:
            return super().train_batch(data, loss_function)
        self._measured = step
        self.optimizer_zero_grad()
        self.forward_backward_batch(data, loss_function.drift(), forward_only=False)
        gradient = {
            name: _local(parameter.grad).clone()
            for name, parameter in self.module.named_parameters()
            if parameter.grad is not None
        }
        output = super().train_batch(data, loss_function)
        output["metrics"][DRIFT] = [self.drift.add(gradient, output["metrics"]["grad_norm"])]
        return output

    def _norm(self, shards: Iterable[Tensor]) -> float:
        """Euclidean norm over the parts that all ranks hold."""
        squares = torch.stack([shard.double().square().sum() for shard in shards]).sum()
        torch.distributed.all_reduce(squares, group=self.get_data_parallel_group())
        return squares.sqrt().item()

    def optimizer_step(self) -> float:
        """One update; returns the gradient norm before clipping. A non-finite one changes no weight.

        The warm-up is the local trainer's; verl's own begins with 0.
        """
        self._updates += 1
        options = self.optimizer_config
        self._rate = learning_rate(options.lr, options.lr_warmup_steps, self._updates)
        for group in self.optimizer.param_groups:
            group["lr"] = self._rate
        return super().optimizer_step()

    def lr_scheduler_step(self) -> float:
        """The rate of the last update."""
        return self._rate

    def hold(self) -> None:
        """Keep the weights as rollout engines take them, for `lend_held`."""
        self._held = {
            name: _local(value).detach().to("cpu", torch.bfloat16, copy=True)
            for name, value in self.module.named_parameters()
        }

    @torch.no_grad()
    def lend_held(self) -> None:
        """Put the held weights in the place of the trained ones, until `take_back`."""
        self._own = {}
        for name, parameter in self.module.named_parameters():
            self._own[name] = _local(parameter).to("cpu", copy=True)
            _local(parameter).copy_(self._held[name])

    @torch.no_grad()
    def take_back(self) -> None:
        """Put the trained weights back, bit for bit."""
        for name, parameter in self.module.named_parameters():
            _local(parameter).copy_(self._own.pop(name))

    def held_shard(self) -> dict[str, Tensor]:
        """This rank's part of the held weights."""
        return {SAMPLER + name: value for name, value in self._held.items()}

    def shard(self) -> dict[str, Tensor]:
        """This rank's part of everything that shapes the next update."""
        parameters = {MODEL + name: _local(value) for name, value in self.module.named_parameters()}
        state = {name: _local(value) for name, value in optimizer_tensors(self.optimizer).items()}
        return parameters | state | self.drift.tensors() | {UPDATES: torch.tensor(self._updates)}

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
        self.drift.restore(tensors)
        self._measured = None
        self._updates = int(tensors[UPDATES])
        self._held = {name.removeprefix(SAMPLER): value for name, value in tensors.items() if name.startswith(SAMPLER)}


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
            EngineRegistry._engines["language_model"][strategy][device] = FsdpEngine
