"""Attention by documents: sequences one behind another in one row, of which none sees another.

Nothing is padded but the row's end. The kernel is FlashAttention's for sequences of any length,
whose backward adds up in one order where torch is asked for that. It stands behind the library's
own hook for attention functions, so layers are the library's. That a family computes so what it
computes of padded rows is measured when a trainer starts (`bins.py`).
Axes: `T` token of the row, `D` of a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

ATTENTION = "documents"  # its name among the library's implementations


@dataclass(frozen=True, slots=True)
class Documents:
    """Where the sequences of one row lie. Shapes depend on the row's tokens alone.

    No tuple: FSDP2 would move all of it to the GPU.
    """

    positions_1T: Tensor  # int64, from 0 in each sequence
    starts: Tensor  # int32 (T + 1,): first token of each; from entry `number` on, T
    extent: Tensor  # int64 (2,) on the host: number of sequences, tokens of the longest

    @classmethod
    def of(cls, lengths: Sequence[int], num_tokens: int) -> Documents:
        """On the host. What the sequences leave of the row is one more."""
        rest = num_tokens - sum(lengths)
        if rest < 0 or min(lengths) < 1:
            raise ValueError(f"sequences of {list(lengths)} tokens in a row of {num_tokens}")
        every = [*lengths, rest] if rest else list(lengths)
        starts = np.full(num_tokens + 1, num_tokens, np.int32)
        starts[: len(every)] = np.cumsum([0, *every[:-1]])
        positions = np.concatenate([np.arange(length) for length in every])
        return cls(
            torch.from_numpy(positions[None]),
            torch.from_numpy(starts),
            torch.tensor([len(every), max(every)]),
        )

    def to(self, device: torch.device | str) -> Documents:
        """The same there, but for what stays on the host."""
        return Documents(
            self.positions_1T.to(device, non_blocking=True),
            self.starts.to(device, non_blocking=True),
            self.extent,
        )

    def longer(self, num: int) -> Documents:
        """With so many more tokens behind the row, which are a document of their own."""
        if not num:
            return self
        number, longest = self.extent.tolist()
        end = self.positions_1T.shape[1]
        starts = self.starts.new_full((end + num + 1,), end + num)
        starts[:number] = self.starts[:number]
        starts[number] = end
        more_1T = torch.arange(num, device=starts.device)[None]
        return Documents(
            torch.cat([self.positions_1T, more_1T], 1),
            starts,
            torch.tensor([number + 1, max(longest, num)]),
        )

    def inputs(self) -> dict[str, Any]:
        """For the library's forward."""
        return {
            "position_ids": self.positions_1T,
            "attention_mask": None,
            "document_starts": self.starts,
            "document_extent": self.extent,
        }


def use_documents(model: Any) -> None:  # noqa: ANN401  (an untyped library)
    """From now on the model takes documents; what is padded it computes as before."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(ATTENTION, attend)
    model.config._attn_implementation = ATTENTION


def attend(
    module: torch.nn.Module,
    query_1hTD: Tensor,
    key_1hTD: Tensor,
    value_1hTD: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    document_starts: Tensor | None = None,
    document_extent: Tensor | None = None,
    **kwargs: Any,  # noqa: ANN401
) -> tuple[Tensor, None]:
    """An attention function of the library; answers (1, T, heads, D)."""
    if document_starts is None or document_extent is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        found: tuple[Tensor, None] = sdpa_attention_forward(
            module, query_1hTD, key_1hTD, value_1hTD, attention_mask, scaling=scaling, **kwargs
        )
        return found
    if attention_mask is not None or any(kwargs.get(name) is not None for name in _UNKNOWN):
        raise ValueError("documents are attended to without a mask, sinks, caps or biases")
    if value_1hTD.shape[-1] != query_1hTD.shape[-1] or not getattr(module, "is_causal", True):
        raise ValueError("documents are attended to causally, by values as wide as keys")
    scale = query_1hTD.shape[-1] ** -0.5 if scaling is None else scaling
    window = -1 if sliding_window is None else sliding_window - 1
    query, key, value = (
        t_1hTD[0].transpose(0, 1).contiguous() for t_1hTD in (query_1hTD, key_1hTD, value_1hTD)
    )
    output_ThD, _ = _fused(query, key, value, document_starts, document_extent, scale, window)
    return output_ThD[None], None


_UNKNOWN = ("s_aux", "softcap", "position_bias")


@torch.library.custom_op("rlstreams::attend", mutates_args=())
def _fused(
    query_ThD: Tensor,
    key_ThD: Tensor,
    value_ThD: Tensor,
    starts: Tensor,
    extent: Tensor,
    scale: float,
    window: int,
) -> tuple[Tensor, Tensor]:
    """Output (T, heads, D) and log-sums (heads, T) of a GPU."""
    number, longest = extent.tolist()
    starts = starts[: number + 1]
    output_ThD, log_sums_hT, *_ = torch.ops.aten._flash_attention_forward(
        query_ThD, key_ThD, value_ThD, starts, starts, longest, longest, 0.0, True, False,
        scale=scale, window_size_left=window, window_size_right=-1,
    )  # fmt: skip
    return output_ThD, log_sums_hT


@_fused.register_fake
def _(
    query_ThD: Tensor,
    key_ThD: Tensor,
    value_ThD: Tensor,
    starts: Tensor,
    extent: Tensor,
    scale: float,
    window: int,
) -> tuple[Tensor, Tensor]:
    num_tokens, heads, _ = query_ThD.shape
    sums_hT = query_ThD.new_empty(heads, num_tokens, dtype=torch.float32)
    return torch.empty_like(query_ThD), sums_hT


@torch.library.custom_op("rlstreams::attend_backward", mutates_args=())
def _fused_backward(
    gradient_ThD: Tensor,
    query_ThD: Tensor,
    key_ThD: Tensor,
    value_ThD: Tensor,
    output_ThD: Tensor,
    log_sums_hT: Tensor,
    starts: Tensor,
    extent: Tensor,
    scale: float,
    window: int,
) -> tuple[Tensor, Tensor, Tensor]:
    number, longest = extent.tolist()
    starts = starts[: number + 1]
    device = query_ThD.device
    no_dropout = torch.zeros(2, dtype=torch.uint64, device=device)
    query, key, value = torch.ops.aten._flash_attention_backward(
        gradient_ThD, query_ThD, key_ThD, value_ThD, output_ThD, log_sums_hT, starts, starts,
        longest, longest, 0.0, True, no_dropout, torch.empty(0, device=device),
        scale=scale, window_size_left=window, window_size_right=-1,
    )  # fmt: skip
    return query, key, value


@_fused_backward.register_fake
def _(
    gradient_ThD: Tensor,
    query_ThD: Tensor,
    key_ThD: Tensor,
    value_ThD: Tensor,
    *_more: Any,  # noqa: ANN401
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(query_ThD), torch.empty_like(key_ThD), torch.empty_like(value_ThD)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:  # noqa: ANN401
    *tensors, ctx.scale, ctx.window = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(*tensors, *output)


def _backward(ctx: Any, gradient_ThD: Tensor, _sums_hT: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
    query, key, value, starts, extent, output, sums = ctx.saved_tensors
    found = torch.ops.rlstreams.attend_backward(
        gradient_ThD.contiguous(), query, key, value, output, sums, starts, extent,
        ctx.scale, ctx.window,
    )  # fmt: skip
    return (*found, None, None, None, None)


_fused.register_autograd(_backward, setup_context=_keep)
