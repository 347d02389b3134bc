"""The policy loss inside verl's engine: its logits-processor hook, with the objective code of the local trainer."""

from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor
from verl.utils import tensordict_utils

from score_centering.objectives import LossResult, Objective, policy_loss_from_logits
from score_centering.training.verl.batch import response_rows, to_tokens

SUMS = "sums"
LOGPROBS = "policy_logprobs"


class PolicyLoss:
    """verl calls it twice a micro-batch: with the logits, while they exist, and then for the loss and the metrics.

    The first call does the work (one pass over the logits makes loss, metric sums and gradient) and keeps the result
    for the second. The loss is multiplied by the number of ranks, because verl averages gradients over them.
    """

    def __init__(self, objective: Objective) -> None:
        self.objective = objective
        self._result: LossResult | None = None

    def __call__(
        self,
        model_output: dict[str, Tensor] | None = None,
        data: TensorDict | None = None,
        dp_group: Any = None,
        student_logits: Tensor | None = None,
        data_format: str = "thd",
    ) -> Any:
        """As logits processor: student_logits (1, N, V), already divided by the temperature, of the N packed tokens of
        `data`; returns {LOGPROBS: (1, N) float32}, 0 at tokens of prompts. As loss: (scalar, {SUMS: [sums]})."""
        if student_logits is not None:
            return self._from_logits(student_logits.squeeze(0), data)
        result, self._result = self._result, None
        ranks = tensordict_utils.get_non_tensor_data(data, "dp_size", 1)
        values = torch.stack(list(result.sums.values())).tolist()
        return result.loss * ranks, {SUMS: [dict(zip(result.sums, values, strict=True))]}

    def _from_logits(self, logits: Tensor, data: TensorDict) -> dict[str, Tensor]:
        rows = response_rows(data)
        tokens = to_tokens(data, self.objective)
        self._result = policy_loss_from_logits(logits[rows], tokens, self.objective)
        logprobs = torch.zeros(logits.shape[0], device=logits.device)
        logprobs[rows] = self._result.logprobs.float()
        return {LOGPROBS: logprobs.unsqueeze(0)}
