"""Attention by documents: sequences one behind another in one row, none of which sees another.

Nothing is padded but the row's end. The kernel is FlashAttention's for sequences of any length,
whose backward adds up in one order where torch is asked for that. It stands behind the library's
own hook for attention functions, so layers are the library's. A trainer's start checks by
measurement that a family computes the same of documents as of padded rows (`bins.py`).

A document may begin with tokens of an earlier one (`cut.py` decides): these lie in the row once.
Its queries are then its own tokens, its keys those of all its tokens. The kernel lets the last
query see the last key, so each query sees the same as alone. The gradient that its keys add to
another's tokens is summed in float32, document by document from the last: in one order.
Axes: `T` token of the row, `K` key, `D` of a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rlstreams.workers.model.prefixes import MOST_TAKEN, NOTHING_TAKEN, Taken

ATTENTION = "documents"  # its name among the library's implementations
_EXACT = 4  # bytes of the numbers that sums are taken in


@dataclass(frozen=True, slots=True)
class SharedKeys:
    """Places of the keys of a row's sequences, several of which have keys in common."""

    # int32 ((1 + MOST_TAKEN) * T,): place in the row of each key, sequence by sequence; then 0.
    keys: Tensor
    starts: Tensor  # int32 (T + 1,): first key of each sequence; from entry `number` on, K
    own: Tensor  # int32 (T,): number of each token's key, in the token's own sequence
    before: Tensor  # int64 (T,): place of the token before each; of a first token, 0
    # int64 (T + 1, 3) on the host: (K, most keys of a sequence, sequences that take tokens over),
    # then for each of these its first key, the first key of the sequence it takes from, and how
    # many.
    tree: Tensor

    @classmethod
    def of(cls, own: Sequence[int], taken: Sequence[Taken], num_tokens: int) -> SharedKeys:
        """
        Args:
            own: tokens that each sequence has in the row, the rest of the row included.
            taken: tokens that each sequence takes over.
        """
        places: list[npt.NDArray[np.int32]] = []
        starts = np.zeros(num_tokens + 1, np.int32)
        own_T, before_T = np.zeros(num_tokens, np.int32), np.zeros(num_tokens, np.int64)
        tree = np.zeros((num_tokens + 1, 3), np.int64)
        takes = 0
        first = place = 0  # key, token
        for number, (length, (of, num)) in enumerate(zip(own, taken, strict=True)):
            its_own = np.arange(place, place + length, dtype=np.int32)
            its = np.concatenate([places[of][:num], its_own]) if num else its_own
            places.append(its)
            own_T[its_own] = np.arange(first + num, first + num + length)
            before_T[its[1:]] = its[:-1]
            if num:
                takes += 1
                tree[takes] = first, starts[of], num
            starts[number] = first
            first, place = first + len(its), place + length
        keys = np.zeros((1 + MOST_TAKEN) * num_tokens, np.int32)
        if first > len(keys):
            raise ValueError(
                f"{first} keys in a row of {num_tokens} tokens, of {len(keys)} at most"
            )
        starts[len(own) :] = first
        tree[0] = first, max(map(len, places)), takes
        keys[:first] = np.concatenate(places)
        arrays = (keys, starts, own_T, before_T, tree)
        return cls(*map(torch.from_numpy, arrays))

    def to(self, device: torch.device | str) -> SharedKeys:
        """The same on a device, except for the tensor that stays on the host."""
        return SharedKeys(
            self.keys.to(device, non_blocking=True),
            self.starts.to(device, non_blocking=True),
            self.own.to(device, non_blocking=True),
            self.before.to(device, non_blocking=True),
            self.tree,
        )


@dataclass(frozen=True, slots=True)
class Documents:
    """Places of the sequences of one row. Shapes depend on the row's tokens alone.

    Not a tuple: FSDP2 would move all of it to the GPU.
    """

    positions_1T: Tensor  # int64, from 0 in each sequence
    starts: Tensor  # int32 (T + 1,): first token of each; from entry `number` on, T
    extent: Tensor  # int64 (2,) on the host: number of sequences, most tokens of one in the row
    shared: SharedKeys | None = None  # None: sequences have no tokens in common

    @classmethod
    def of(
        cls, lengths: Sequence[int], num_tokens: int, taken: Sequence[Taken] | None = None
    ) -> Documents:
        """Documents of these sequences, on the host. The rest of the row is one more.

        Args:
            lengths: tokens of each sequence, with those that lie in the row as another's.
            taken: tokens that each takes over; None: shapes are those of rows without sharing.
        """
        over = [NOTHING_TAKEN] * len(lengths) if taken is None else list(taken)
        own = [length - num for length, (_, num) in zip(lengths, over, strict=True)]
        rest = num_tokens - sum(own)
        fits = all(not n or (of < i and n <= lengths[of]) for i, (of, n) in enumerate(over))
        if rest < 0 or min(own) < 1 or not fits:
            more = "" if taken is None else f", of which they take over {[n for _, n in over]},"
            raise ValueError(f"sequences of {list(lengths)} tokens{more} in a row of {num_tokens}")
        if rest:
            own, over = [*own, rest], [*over, NOTHING_TAKEN]
        starts = np.full(num_tokens + 1, num_tokens, np.int32)
        starts[: len(own)] = np.cumsum([0, *own[:-1]])
        spans = zip(own, over, strict=True)
        positions = np.concatenate([np.arange(num, num + length) for length, (_, num) in spans])
        return cls(
            torch.from_numpy(positions[None]),
            torch.from_numpy(starts),
            torch.tensor([len(own), max(own)]),
            None if taken is None else SharedKeys.of(own, over, num_tokens),
        )

    def to(self, device: torch.device | str) -> Documents:
        """The same on a device, except for the tensor that stays on the host."""
        return Documents(
            self.positions_1T.to(device, non_blocking=True),
            self.starts.to(device, non_blocking=True),
            self.extent,
            None if self.shared is None else self.shared.to(device),
        )

    def places(self, num: int) -> npt.NDArray[np.int64]:
        """On the host: place of each of the sequences' `num` tokens, sequence by sequence."""
        if self.shared is None:
            return np.arange(num)
        return self.shared.keys[:num].numpy().astype(np.int64)

    def scored(
        self, chosen_S: npt.NDArray[np.bool_]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64] | None]:
        """On the host: places of the chosen tokens, each once, and the index of each chosen token
        among them; None: the places are as many, in the same order."""
        places_N = self.places(len(chosen_S))[chosen_S]
        if self.shared is None or not self.shared.tree[0, 2]:
            return places_N, None
        return np.unique(places_N, return_inverse=True)

    def before(self, places_N: Tensor) -> Tensor:
        """Places of the tokens before these."""
        return places_N - 1 if self.shared is None else self.shared.before[places_N]

    def longer(self, num: int) -> Documents:
        """The same with `num` more tokens at the end, as a document of their own."""
        assert self.shared is None, "ranks that share a row do not share tokens"
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
        """Arguments for the library's forward."""
        inputs = {
            "position_ids": self.positions_1T,
            "attention_mask": None,
            "document_starts": self.starts,
            "document_extent": self.extent,
        }
        if (shared := self.shared) is None:
            return inputs
        return inputs | {
            "document_keys": shared.keys,
            "document_key_starts": shared.starts,
            "document_own_keys": shared.own,
            "document_tree": shared.tree,
        }


def use_documents(model: Any) -> None:  # noqa: ANN401  (an untyped library)
    """Let the model take documents from now on; padded rows are computed as before."""
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
    """An attention function of the library; returns (1, T, heads, D)."""
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
    shared = (kwargs.get(name) for name in _SHARED)
    output_ThD, _ = _fused(
        query, key, value, document_starts, document_extent, scale, window, *shared
    )
    return output_ThD[None], None


_UNKNOWN = ("s_aux", "softcap", "position_bias")
_SHARED = ("document_keys", "document_key_starts", "document_own_keys", "document_tree")


def _kernel(
    query_ThD: Tensor,
    key_KhD: Tensor,
    value_KhD: Tensor,
    starts: Tensor,
    key_starts: Tensor,
    longest: Sequence[int],
    scale: float,
    window: int,
) -> tuple[Tensor, Tensor]:
    """Output (T, heads, D) and log-sums (heads, T), on a GPU.

    Args:
        starts: of queries; T after the last sequence.
        longest: most queries and keys of a sequence.
    """
    output_ThD, log_sums_hT, *_ = torch.ops.aten._flash_attention_forward(
        query_ThD, key_KhD, value_KhD, starts, key_starts, *longest, 0.0, True, False,
        scale=scale, window_size_left=window, window_size_right=-1,
    )  # fmt: skip
    return output_ThD, log_sums_hT


def _kernel_backward(
    gradient_ThD: Tensor,
    query_ThD: Tensor,
    key_KhD: Tensor,
    value_KhD: Tensor,
    output_ThD: Tensor,
    log_sums_hT: Tensor,
    starts: Tensor,
    key_starts: Tensor,
    longest: Sequence[int],
    scale: float,
    window: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries, keys and values."""
    device = query_ThD.device
    no_dropout = torch.zeros(2, dtype=torch.uint64, device=device)
    query, key, value = torch.ops.aten._flash_attention_backward(
        gradient_ThD, query_ThD, key_KhD, value_KhD, output_ThD, log_sums_hT, starts, key_starts,
        *longest, 0.0, True, no_dropout, torch.empty(0, device=device),
        scale=scale, window_size_left=window, window_size_right=-1,
    )  # fmt: skip
    return query, key, value


@torch.library.custom_op("rlstreams::attend", mutates_args=())
def _fused(
    query_ThD: Tensor,
    key_ThD: Tensor,
    value_ThD: Tensor,
    starts: Tensor,
    extent: Tensor,
    scale: float,
    window: int,
    keys: Tensor | None = None,
    key_starts: Tensor | None = None,
    own: Tensor | None = None,
    tree: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Output (T, heads, D) and log-sums (heads, T)."""
    given = _laid_out(key_ThD, value_ThD, starts, extent, keys, key_starts, tree)
    return _kernel(query_ThD, *given, scale, window)


@_fused.register_fake
def _(query_ThD: Tensor, *_more: Any) -> tuple[Tensor, Tensor]:  # noqa: ANN401
    num_tokens, heads, _ = query_ThD.shape
    sums_hT = query_ThD.new_empty(heads, num_tokens, dtype=torch.float32)
    return torch.empty_like(query_ThD), sums_hT


def _laid_out(
    key_ThD: Tensor,
    value_ThD: Tensor,
    starts: Tensor,
    extent: Tensor,
    keys: Tensor | None,
    key_starts: Tensor | None,
    tree: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, tuple[int, int]]:
    """The kernel's arguments after the queries: a sequence's keys and values lie together."""
    number, longest = extent.tolist()
    starts = starts[: number + 1]
    if tree is None or keys is None or key_starts is None or not tree[0, 2]:
        return key_ThD, value_ThD, starts, starts, (longest, longest)
    num_keys, most_keys, _ = tree[0].tolist()
    key, value = (t_ThD.index_select(0, keys[:num_keys]) for t_ThD in (key_ThD, value_ThD))
    return key, value, starts, key_starts[: number + 1], (longest, most_keys)


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
    keys: Tensor | None = None,
    key_starts: Tensor | None = None,
    own: Tensor | None = None,
    tree: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    key, value, starts, key_starts, longest = _laid_out(
        key_ThD, value_ThD, starts, extent, keys, key_starts, tree
    )
    of_query, of_key, of_value = _kernel_backward(
        gradient_ThD, query_ThD, key, value, output_ThD, log_sums_hT, starts, key_starts, longest,
        scale, window,
    )  # fmt: skip
    if tree is None or own is None or not tree[0, 2]:
        return of_query, of_key, of_value
    both_2KhD = torch.stack([of_key, of_value])
    summed_2KhD = both_2KhD.float() if both_2KhD.itemsize < _EXACT else both_2KhD
    # From the last: a sequence passes a gradient on only once it has received all of its own.
    for first, taken, num in reversed(tree[1 : 1 + int(tree[0, 2])].tolist()):
        summed_2KhD[:, taken : taken + num] += summed_2KhD[:, first : first + num]
    key, value = (t_KhD.index_select(0, own).to(of_key.dtype) for t_KhD in summed_2KhD)
    return of_query, key, value


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
    *tensors, ctx.scale, ctx.window = inputs[:7]
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(*tensors, *output, *inputs[7:])


def _backward(ctx: Any, gradient_ThD: Tensor, _sums_hT: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
    query, key, value, starts, extent, output, sums, *shared = ctx.saved_tensors
    found = torch.ops.rlstreams.attend_backward(
        gradient_ThD.contiguous(), query, key, value, output, sums, starts, extent,
        ctx.scale, ctx.window, *shared,
    )  # fmt: skip
    return (*found, *[None] * 8)


_fused.register_autograd(_backward, setup_context=_keep)
