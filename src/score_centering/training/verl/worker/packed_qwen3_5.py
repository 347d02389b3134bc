"""Packed rows of Qwen3.5: sequence offsets reach the gated linear attention, so samples never leak into each other.

verl packs the samples of a microbatch into one row whose position ids start again at each sample. From those,
transformers masks the full attention; its gated linear attention looks at two keywords instead, which nobody passes:
`seq_idx` (for causal-conv1d's kernel) and `cu_seq_lens_q` (for flash-linear-attention's). And the plain torch kernels,
used where those packages are missing, know neither. `install` passes both and lets the torch kernels take the
sequences one by one. Importing this module installs it: verl imports `actor_rollout_ref.model.external_lib` in every
worker and calls nothing.
"""

import functools
import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import find_packed_sequence_indices
from transformers.models.qwen3_5 import modeling_qwen3_5 as modeling


def packing(position_ids: Tensor) -> dict[str, Tensor]:
    """The keywords that tell kernels where the sequences of a packed row begin; empty for a row of one sequence.

    Args:
        position_ids: (1, S), counting up by one within a sequence.

    Returns:
        seq_idx (1, S) int32, the number of each position's sequence; cu_seq_lens_q (N + 1,) int32, where they start and
        end.
    """
    index = find_packed_sequence_indices(position_ids)
    if index is None:
        return {}
    lengths = torch.bincount(index[0])
    offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    return {"seq_idx": index.to(torch.int32), "cu_seq_lens_q": offsets.to(torch.int32)}


def install() -> None:
    """Replace transformers' forward and, where no fast package is installed, its torch kernels; once is enough."""
    if hasattr(modeling.Qwen3_5TextModel.forward, "packs"):
        return
    modeling.Qwen3_5TextModel.forward = _packs(modeling.Qwen3_5TextModel.forward)
    if not _installed("causal_conv1d"):
        modeling.causal_conv1d_fn = _split_convolution(modeling.causal_conv1d_fn)
    if not _installed("fla"):
        modeling.torch_chunk_gated_delta_rule = _split_delta_rule(modeling.torch_chunk_gated_delta_rule)


def _installed(package: str) -> bool:
    """Whether a kernel package is there; one that can't be imported is an error here, where transformers falls back."""
    if importlib.util.find_spec(package) is None:
        return False
    importlib.import_module(package)
    return True


def _packs(forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def packed(
        self: Any,
        input_ids: Tensor | None = None,
        attention_mask: Any = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        **keywords: Any,
    ) -> Any:
        """position_ids: (1, S), or (4, 1, S): text, time, height and width."""
        if position_ids is not None and attention_mask is None and past_key_values is None:
            text = position_ids[0] if position_ids.dim() == 3 else position_ids
            if text.shape[0] == 1 and (sequences := packing(text)):
                keywords |= sequences | {"use_cache": False}  # a cache would take them for one sequence
        return forward(
            self,
            input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            **keywords,
        )

    packed.packs = True  # type: ignore[attr-defined]
    return packed


def _split_convolution(kernel: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(kernel)
    def split(hidden_states: Tensor, *weights: Any, cu_seq_lens_q: Tensor | None = None, **keywords: Any) -> Tensor:
        """hidden_states (1, C, S)."""
        if cu_seq_lens_q is None:
            return kernel(hidden_states, *weights, **keywords)
        parts = hidden_states.split(cu_seq_lens_q.diff().tolist(), dim=-1)
        return torch.cat([kernel(part, *weights, **keywords) for part in parts], dim=-1)

    return split


def _split_delta_rule(kernel: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(kernel)
    def split(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        cu_seqlens: Tensor | None = None,
        **keywords: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """query, key, value (1, S, H, D), g, beta (1, S, H); a packed row leaves no state behind."""
        if cu_seqlens is None:
            return kernel(query, key, value, g=g, beta=beta, **keywords)
        sizes = cu_seqlens.diff().tolist()
        parts = zip(*(x.split(sizes, dim=1) for x in (query, key, value, g, beta)), strict=True)
        outputs = [kernel(q, k, v, g=decay, beta=strength, **keywords)[0] for q, k, v, decay, strength in parts]
        return torch.cat(outputs, dim=1), None

    return split


install()
