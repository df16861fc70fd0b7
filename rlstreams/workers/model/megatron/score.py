"""Log-probs of chosen tokens by a megatron-core model, as `TokenScorer` for Hugging Face's.

Ranks of one matrix compute the same rows and share the head's vocabulary. Ranks of other experts
compute other rows, padded to the largest shape. Stages pass on hidden states, and the last one
sends its scores back to all, so that every rank computes the same loss and calls the same backward,
in which the stages pass gradients back. One micro-batch is under way at a time.
Axes: `B` row, `T` token (the library's `S`), `N` chosen token, `V` vocabulary, `H` hidden.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rlstreams.workers.model.base import LOGITS_BYTES
from rlstreams.workers.model.documents import Documents
from rlstreams.workers.model.head import Function, Head
from rlstreams.workers.model.layers import recompute_layers
from rlstreams.workers.model.megatron.build import RankModel, forget_replays
from rlstreams.workers.model.megatron.split_head import SplitHead, group_of
from rlstreams.workers.model.megatron.tables import mixed_layers
from rlstreams.workers.model.routing import Counted, Forced, Routes, RoutingReplay
from rlstreams.workers.model.token_scores import (
    TokenScores,
    ValueHead,
    in_chunks,
    places_of,
    scored,
)

WHY_PADDED = "layers of megatron-core are given padded rows"
WHY_EAGER = "layers of megatron-core are computed as they are"


class MegatronScores(nn.Module):
    """One rank's model as a function from tokens to log-probs; all ranks call it together."""

    def __init__(self, rank_model: RankModel, *, recomputes: bool = False) -> None:
        super().__init__()
        self.rank_model = rank_model
        self.model = rank_model.model
        self.routing = MegatronRouting(rank_model)
        self.vocab_size: int = rank_model.config.vocab_size
        layout = rank_model.layout
        self._stage = layout.stage(rank_model.rank)
        rows = max(1, LOGITS_BYTES // (4 * self.vocab_size))
        self.head = Head(rows) if layout.tp == 1 else SplitHead(rows, rank_model)
        self.value_head: ValueHead | None = None  # on the last stage; all others receive its values
        if recomputes:
            recompute_layers(list(self.model.decoder.layers))

    def forward(
        self,
        ids_BT: Tensor,
        real_BT: Tensor | None,
        chosen: Tensor,
        temperature_N: Tensor,
        documents: Documents | None = None,
        top: int | Tensor = 0,
    ) -> TokenScores:
        """See `TokenScorer`; rows are padded at their end."""
        assert documents is None, WHY_PADDED
        del real_BT
        chosen_N = places_of(chosen)
        ids_N = ids_BT.flatten()[chosen_N]
        row_N, column_N = chosen_N // ids_BT.shape[1], chosen_N % ids_BT.shape[1] - 1
        hidden_TBH = self._hidden(self._alike(ids_BT))
        layout, rank = self.rank_model.layout, self.rank_model.rank
        num_top = top if isinstance(top, int) else top.shape[1]
        has_values = self.value_head is not None
        if self._stage < layout.pp - 1:
            ahead = [layout.neighbour(rank, n) for n in (1, layout.pp - 1 - self._stage)]
            number = 2 + has_values + 2 * num_top
            found_CN = _Sent.apply(hidden_TBH, (number, len(ids_N)), *ahead)
            return _of_columns(found_CN.unbind(), has_values, num_top)
        columns = self._columns(hidden_TBH[column_N, row_N], ids_N, temperature_N, top)
        for stages in range(1, layout.pp):
            sent = torch.stack([column.float() for column in columns]).detach()
            dist.send(sent, layout.neighbour(rank, -stages))
        return _of_columns(columns, has_values, num_top)

    def _columns(
        self, hidden_NH: Tensor, ids_N: Tensor, temperature_N: Tensor, top: int | Tensor
    ) -> list[Tensor]:
        """Log-probs and entropies; values; log-probs of other tokens, then their ids: (N,) each."""
        values = [] if self.value_head is None else [self.value_head(hidden_NH)]
        if self.rank_model.layout.tp > 1:
            from megatron.core.tensor_parallel.mappings import (
                copy_to_tensor_model_parallel_region,
            )

            hidden_NH = copy_to_tensor_model_parallel_region(hidden_NH)
        matrix_VH = self._matrix()
        if isinstance(top, int) and not top:
            return [*self.head(hidden_NH, matrix_VH, ids_N, temperature_N), *values]
        tops = [top] if isinstance(top, Tensor) else []

        def score(
            rows_nH: Tensor, ids_n: Tensor, temperature_n: Tensor, *top_ids_nK: Tensor
        ) -> tuple[Tensor, ...]:
            logits_nV = rows_nH @ matrix_VH.T
            found: tuple[Tensor, ...] = self.topped(
                logits_nV, ids_n, temperature_n, *(top_ids_nK or [top])
            )
            return found

        rows = self.head.rows
        *found, top_NK, ids_NK = in_chunks(score, rows, hidden_NH, ids_N, temperature_N, *tops)
        return [*found, *values, *top_NK.unbind(1), *ids_NK.unbind(1)]

    @property
    def topped(self) -> Function:
        """`scored`, on this rank's part of the logits."""
        return self.head.topped if isinstance(self.head, SplitHead) else scored

    def _hidden(self, ids_BT: Tensor) -> Tensor:
        """This stage's hidden states of a batch."""
        model, config = self.model, self.rank_model.config
        if self._stage == 0:
            hidden_TBH = model.embedding(ids_BT, None)
            if config.pad_token_id is not None:  # in Hugging Face's table this row does not learn
                is_pad_TB1 = (config.pad_token_id == ids_BT.T)[..., None]
                hidden_TBH = torch.where(is_pad_TB1, hidden_TBH.detach(), hidden_TBH)
        else:
            shape, like = (*ids_BT.T.shape, config.hidden_size), self._dtype_and_device
            source = self.rank_model.layout.neighbour(self.rank_model.rank, -1)
            empty = torch.zeros(0, device=ids_BT.device, requires_grad=torch.is_grad_enabled())
            hidden_TBH = _Received.apply(empty, torch.empty(shape, **like), source)
            model.decoder.set_input_tensor(hidden_TBH)
        rope = model.rotary_pos_emb(ids_BT.shape[1])
        found: Tensor = model.decoder(hidden_TBH, None, rotary_pos_emb=rope)
        return found

    @property
    def _dtype_and_device(self) -> dict[str, Any]:
        any_parameter = next(self.model.parameters())
        return {"dtype": any_parameter.dtype, "device": any_parameter.device}

    def _matrix(self) -> Tensor:
        is_tied = self.rank_model.config.tie_word_embeddings
        layer = self.model.embedding.word_embeddings if is_tied else self.model.output_layer
        weight: Tensor = layer.weight
        return weight

    def _alike(self, ids_BT: Tensor) -> Tensor:
        """Pad ids to the largest shape of all ranks, where they share experts."""
        if self.rank_model.layout.ep > 1:
            shape = torch.tensor(ids_BT.shape, device=ids_BT.device)
            dist.all_reduce(shape, dist.ReduceOp.MAX)
            ids_BT = padded(ids_BT, *shape.tolist())
        self.routing.lay_out(*ids_BT.shape)
        return ids_BT


class MegatronRouting(RoutingReplay):
    """The routers of one rank; recorded rows are of all layers, this stage takes its own."""

    def __init__(self, rank_model: RankModel) -> None:
        config, layout = rank_model.config, rank_model.layout
        mixed = mixed_layers(config)
        first = layout.stage(rank_model.rank) * (len(mixed) // layout.pp)
        layers = enumerate(rank_model.model.decoder.layers, first)
        self.num_layers = sum(mixed)
        self.num_experts = config.num_experts if any(mixed) else 0
        self._stages = layout.pp
        self._replays = {sum(mixed[:n]): _replay_of(layer) for n, layer in layers if mixed[n]}
        self._routes: Routes | None = None

    @contextmanager
    def replaying(self, routes: Routes | None) -> Iterator[Counted]:
        """See `RoutingReplay`; flips count those of all stages."""
        counted = Counted()
        self._routes = routes
        try:
            yield counted
        finally:
            self._routes = None
            flips = {
                layer: replay.choice.flips
                for layer, replay in self._replays.items()
                if replay.choice is not None and replay.choice.flips is not None
            }
            for replay in self._replays.values():
                replay.choice = None
        counted.update(flips)
        if routes is not None and self._stages > 1:
            total = torch.tensor(counted.num_flips, device=routes.recorded_BT.device)
            dist.all_reduce(total, group=group_of("pipeline_model_parallel"))
            counted.clear()
            counted[0] = total

    def lay_out(self, rows: int, width: int) -> None:
        """Set the routes for the next forward, which has this shape."""
        if self._routes is None:
            return
        recorded_N = padded(self._routes.recorded_BT, rows, width).T.flatten()
        experts_TBLK = padded(self._routes.experts_BTLK, rows, width).transpose(0, 1)
        for layer, replay in self._replays.items():
            experts_NK = experts_TBLK[:, :, layer].flatten(0, 1).long()
            replay.choice = Forced(experts_NK, recorded_N, self.num_experts)


def _replay_of(layer: Any) -> Any:  # noqa: ANN401
    """A `RouterReplay` of the library in which a token without a recorded row keeps its own."""
    router = layer.mlp.router
    library = type(router.router_replay)

    class Replay(library):  # type: ignore[misc, valid-type]
        choice: Forced | None = None

        def get_replay_topk(
            self,
            scores: Tensor,
            topk: int,
            num_groups: int | None = None,
            group_topk: int | None = None,
            default_compute_topk: Any = None,  # noqa: ANN401
        ) -> tuple[Tensor, Tensor]:
            found = torch.return_types.topk(
                default_compute_topk(scores, topk, num_groups, group_topk)
            )
            return tuple(found if self.choice is None else self.choice.answer(scores, found))

    router.router_replay = Replay()
    forget_replays()
    return router.router_replay


def padded(values_BT: Tensor, rows: int, width: int) -> Tensor:
    """Pad with zeros at the end of both axes."""
    found = values_BT.new_zeros(rows, width, *values_BT.shape[2:])
    found[: values_BT.shape[0], : values_BT.shape[1]] = values_BT
    return found


def _of_columns(columns: Sequence[Tensor], has_values: bool, num_top: int) -> TokenScores:
    values_N = columns[2] if has_values else None
    first = 2 + has_values
    tops, ids = columns[first : first + num_top], columns[first + num_top :]
    return TokenScores(
        columns[0],
        columns[1].detach(),
        values_N,
        torch.stack(list(tops), 1) if num_top else None,
        torch.stack(list(ids), 1).detach().long() if num_top else None,
    )


class _Received(torch.autograd.Function):
    """Receive hidden states from the stage before; their gradient is sent back to it."""

    @staticmethod
    def forward(ctx: Any, empty: Tensor, into: Tensor, source: int) -> Tensor:  # noqa: ANN401
        del empty  # only shows autograd that there is a gradient
        ctx.source = source
        dist.recv(into, source)
        return into

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # noqa: ANN401
        dist.send(gradient.contiguous(), ctx.source)
        return torch.zeros(0, device=gradient.device), None, None


class _Sent(torch.autograd.Function):
    """Send hidden states to the next stage; returns the last stage's scores of the tokens."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        hidden_TBH: Tensor,
        shape: tuple[int, int],
        following: int,
        last: int,
    ) -> Tensor:
        ctx.following = following
        ctx.like = torch.empty_like(hidden_TBH, device="meta")
        dist.send(hidden_TBH.contiguous(), following)
        found_CN = torch.empty(shape, device=hidden_TBH.device)
        dist.recv(found_CN, last)
        return found_CN

    @staticmethod
    def backward(ctx: Any, gradient_CN: Tensor) -> Any:  # noqa: ANN401
        into = torch.empty(ctx.like.shape, dtype=ctx.like.dtype, device=gradient_CN.device)
        dist.recv(into, ctx.following)
        return into, None, None, None
