"""The policy loss inside verl's engine: the LM head itself computes it, with the objective code of the local trainer.

verl would hand a loss BF16 logits of every token, (N, V). The head sees the hidden states before that: it needs the
response tokens only, its logits stay FP32 and exist in chunks only, and the loss is the local trainer's to the last
operation.
"""

from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor, nn
from verl.utils import tensordict_utils

from score_centering.objectives import LossResult, Objective, policy_loss_from_hidden
from score_centering.training.verl.worker.response_tokens import response_rows, to_tokens

SUMS = "sums"
DRIFT, DRIFT_STEP = "drift", "drift_step"
LOGPROBS = "policy_logprobs"


class LossHead(nn.Linear):
    """An LM head that answers with the loss of a micro-batch, not with logits, when it was told to `expect` one."""

    _expected: tuple["PolicyLoss", TensorDict] | None = None
    result: LossResult

    def expect(self, loss: "PolicyLoss", data: TensorDict) -> None:
        self._expected = loss, data

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden: (1, N, D) of packed tokens, or (B, S, D) of rows padded on the right."""
        if self._expected is None:
            return super().forward(hidden)
        (loss, data), self._expected = self._expected, None
        self.result = loss.from_hidden(hidden, self.weight, data)
        return self.result.loss


class PolicyLoss:
    """What verl's engine is given as its loss function; picklable, so that Ray can carry it."""

    def __init__(self, objective: Objective, temperature: float) -> None:
        self.objective, self.temperature = objective, temperature

    def drift(self) -> "PolicyLoss":
        """What the drift meter differentiates beside it."""
        return PolicyLoss(self.objective.drift(), self.temperature)

    def from_hidden(self, hidden: Tensor, weight: Tensor, data: TensorDict) -> LossResult:
        """Loss and metric sums of a micro-batch whose last hidden states are `hidden`; weight (V, D) is the head's."""
        chosen = hidden.flatten(0, 1)[response_rows(data, None if len(hidden) == 1 else hidden.shape[1])]
        return policy_loss_from_hidden(
            chosen, weight, to_tokens(data, self.objective), self.objective, self.temperature
        )

    def __call__(self, result: LossResult, data: TensorDict) -> tuple[Tensor, dict[str, Any]]:
        """The loss to differentiate, times the number of ranks because verl averages gradients over them, and the
        metric sums."""
        ranks = tensordict_utils.get_non_tensor_data(data, "dp_size", 1)
        together = torch.cat([value.flatten() for value in result.sums.values()]).cpu()  # waits for the GPU once
        parts = together.split([value.numel() for value in result.sums.values()])
        sums = {
            name: part.view(value.shape).tolist()
            for (name, value), part in zip(result.sums.items(), parts, strict=True)
        }
        return result.loss * ranks, {SUMS: [sums]}


def install_loss_head(model: nn.Module) -> None:
    """Let the LM head of `model` (in place) be a `LossHead`; it has no bias, as policy heads have none."""
    head = model.get_output_embeddings()
    if head.bias is not None:
        raise ValueError("the policy loss needs an LM head without a bias")
    head.__class__ = LossHead
