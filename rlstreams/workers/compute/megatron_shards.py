"""A model in megatron-core's layers, as one rank has it: shares by tensor, stage and expert.

What learns are the rows of Hugging Face tensors, as views into the library's parameters, so that
optimizer, hash and checkpoint know the same names and shapes under every layout and backend.
Gradients of a batch are summed once, in float32, over the ranks that have the same rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rlstreams.workers.compute.shards import Plan, ShardedModel, Share
from rlstreams.workers.config.trainer import TrainerSection
from rlstreams.workers.model.megatron.build import (
    RankModel,
    begin_ranks,
    end_ranks,
    view_of,
)
from rlstreams.workers.model.megatron.layout import Layout
from rlstreams.workers.model.megatron.score import MegatronScores, group_of
from rlstreams.workers.model.megatron.tables import Part


def megatron_shards(
    folder: Path, section: TrainerSection, rank: int, device: str, dtype: str
) -> tuple[Plan, MegatronShards]:
    """This rank's share of a folder, within the process group of all ranks.

    Raises:
        ConfigError: a layout that does not fit ranks or model.
        EngineError: a family without a table of names.
    """
    asked = section.layout
    layout = Layout(ranks=section.ranks, tp=asked.tp, pp=asked.pp, ep=asked.ep)
    begin_ranks(layout, device)
    rank_model = RankModel(folder, layout, rank, device, dtype)
    rank_model.read()
    like = torch.empty(0, dtype=getattr(torch, dtype), device="meta")
    whole = {part.name: like.new_empty(part.shape) for part in rank_model.every}
    published = {part.published or part.name: part.name for part in rank_model.every}
    plan = Plan(
        facts={name: whole[path] for name, path in sorted(published.items())},
        published=dict(sorted(published.items())),
        constant={},
        trained={name: name for name in whole},
        adapters=frozenset(),
        whole=whole,
    )
    return plan, MegatronShards(rank_model, recomputes=section.activation_checkpointing)


class MegatronShards(ShardedModel):
    """See `ShardedModel`. A path is a Hugging Face name."""

    def __init__(self, rank_model: RankModel, *, recomputes: bool) -> None:
        self._model, self.rank = rank_model, rank_model.rank
        self._every = {part.name: part for part in rank_model.every}
        self._layout = layout = rank_model.layout
        self.device = next(rank_model.model.parameters()).device
        self.root = MegatronScores(rank_model, recomputes=recomputes)
        self.rows = {
            name: nn.Parameter(view_of(rank_model.tensors, part))
            for name, part in rank_model.parts.items()
        }
        ranks = range(layout.ranks)
        self.hands = [layout.dp_rank(rank) for rank in ranks]
        self.voices = frozenset(r for r in ranks if not layout.tp_rank(r) and not layout.stage(r))

    def gradients(self) -> dict[str, Tensor]:
        """See `ShardedModel`: of this rank alone."""
        found: dict[str, Tensor] = {}
        own = dict(self._model.model.named_parameters())
        for name, experts in self._model.experts.items():
            # An expert that no token took has none.
            each = [own.pop(expert) for expert in experts]
            zeros = torch.zeros_like(each[0])
            found[name] = torch.stack([zeros if p.grad is None else p.grad for p in each])
        found |= {name: p.grad for name, p in own.items() if p.grad is not None}
        self._model.model.zero_grad()
        parts = self._model.parts.items()
        return {name: view_of(found, p) for name, p in parts if p.parameter in found}

    def add_up(self, path: str, gradient: Tensor) -> None:
        """See `ShardedModel`; a norm of heads also over the ranks that have other heads."""
        part, layout = self._every[path], self._layout
        groups = []
        if len(self._peers(part)) > 1:
            of_experts = part.by == "ep"
            groups.append("expert_data_parallel" if of_experts else "data_parallel")
        if part.is_summed and layout.tp > 1:
            groups.append("tensor_model_parallel")
        if not groups:
            return
        total = gradient.contiguous()
        for name in groups:
            dist.all_reduce(total, group=group_of(name))
        gradient.copy_(total)

    def _peers(self, part: Part) -> list[int]:
        return self._layout.peers(self.rank, of_experts=part.by == "ep")

    def shape(self, path: str) -> Sequence[int]:
        """See `ShardedModel`."""
        return self._every[path].shape

    def share(self, path: str, rank: int) -> Share | None:
        """See `ShardedModel`."""
        return self._every[path].index(rank, self._layout)

    def close(self) -> None:
        """See `ShardedModel`."""
        end_ranks()
