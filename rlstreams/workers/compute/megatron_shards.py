"""A model in megatron-core's layers, as one rank has it: shares by tensor, stage and expert.

The learnt rows are rows of Hugging Face tensors, as views into the library's parameters, so that
optimizer, hash and checkpoint know the same names and shapes under every layout and backend.
Gradients of a batch are summed once, in float32, over the ranks that have the same rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rlstreams.workers.compute.mesh import Mesh
from rlstreams.workers.compute.shards import ShardedModel, Share, TensorPlan, Version
from rlstreams.workers.compute.spec import Layers, ModelSpec
from rlstreams.workers.model.megatron.build import (
    RankModel,
    begin_ranks,
    end_ranks,
    join_alone,
    leave_alone,
    routers_of,
    view_of,
)
from rlstreams.workers.model.megatron.layout import Layout
from rlstreams.workers.model.megatron.score import (
    WHY_EAGER,
    WHY_PADDED,
    MegatronScores,
)
from rlstreams.workers.model.megatron.split_head import group_of
from rlstreams.workers.model.megatron.tables import TensorPart
from rlstreams.workers.model.token_scores import ValueHead
from rlstreams.workers.trainer.learn.critic import named_head


def megatron_layers(spec: ModelSpec, mesh: Mesh) -> Layers:
    """This rank's share of a folder, within the process group of all ranks.

    Raises:
        ConfigError: a layout that does not fit ranks or model.
        EngineError: a family without a table of names.
    """
    asked = spec.layout
    layout = Layout(ranks=mesh.size, tp=asked.tp, pp=asked.pp, ep=asked.ep, asked_by=spec.asked_by)
    if mesh.size == 1:
        join_alone(mesh.device)
    begin_ranks(layout, mesh.device)
    rank_model = RankModel(spec.folder, layout, mesh.rank, mesh.device, spec.dtype)
    if spec.learns:
        rank_model.read()
    shards = MegatronShards(rank_model, learns=spec.learns, recomputes=spec.recomputes)
    head = shards.add_values() if spec.has_values else {}
    like = torch.empty(0, dtype=getattr(torch, spec.dtype), device="meta")
    whole = {part.name: like.new_empty(part.shape) for part in rank_model.every}
    published = {part.published or part.name: part.name for part in rank_model.every}
    plan = TensorPlan(
        facts={name: whole[path] for name, path in sorted(published.items())},
        published=dict(sorted(published.items())),
        constant={},
        trained={name: name for name in (*whole, *head)} if spec.learns else {},
        extra=frozenset(head),
        whole=whole | {name: one.detach().to("meta") for name, one in head.items()},
    )
    return Layers(
        plan=plan,
        shards=shards,
        routers=routers_of(spec.folder) if spec.replay_routes else None,
        why_padded=WHY_PADDED,
        why_eager=WHY_EAGER,
        why_unshared=WHY_PADDED,
    )


class MegatronShards(ShardedModel):
    """See `ShardedModel`. A path is a Hugging Face name."""

    copies = False

    def __init__(self, rank_model: RankModel, *, learns: bool, recomputes: bool) -> None:
        self._model, self.rank, self.model = rank_model, rank_model.rank, rank_model.model
        self._every = {part.name: part for part in rank_model.every}
        self._layout = layout = rank_model.layout
        self.device = next(rank_model.model.parameters()).device
        self.root = self._scores = MegatronScores(rank_model, recomputes=recomputes)
        self._empty = {name: t.to("meta") for name, t in rank_model.tensors.items()}
        self.rows = {
            name: nn.Parameter(view_of(rank_model.tensors, part))
            for name, part in (rank_model.parts.items() if learns else ())
        }
        if not learns:
            rank_model.tensors.clear()  # `release` frees the module's own tensors
        ranks = range(layout.ranks)
        self.hands = [layout.dp_rank(rank) for rank in ranks]
        self.voices = frozenset(r for r in ranks if not layout.tp_rank(r) and not layout.stage(r))

    def add_values(self) -> dict[str, nn.Parameter]:
        """Have the root give values too; the head's parameters by name, on all ranks."""
        head = ValueHead(self._model.config.hidden_size, str(self.device))
        self._scores.value_head = head
        self.add_head(head)
        return named_head(head)

    @property
    def adds_replicated(self) -> bool:
        """See `ShardedModel`: the last stage has hidden states, equal on its tensor ranks."""
        layout = self._layout
        return layout.stage(self.rank) == layout.pp - 1 and not layout.tp_rank(self.rank)

    def version(self) -> Version:
        """See `ShardedModel`: in the library's layout: queries, keys and values in one tensor."""
        tensors = {n: torch.empty_like(t, device=self.device) for n, t in self._empty.items()}
        parts = self._model.parts.items()
        return Version({name: view_of(tensors, part) for name, part in parts}, tensors)

    def receive(self, version: Version, path: str, whole: Tensor | None) -> None:
        """See `ShardedModel`."""
        self.scatter(path, whole, version.rows.get(path))

    def hold(self, version: Version) -> None:
        """See `ShardedModel`: points the model's parameters at the version's tensors."""
        own = dict(self.model.named_parameters())
        for name, tensor in self._model.by_parameter(version.tensors).items():
            own[name].data = tensor

    def release(self) -> None:
        """See `ShardedModel`."""
        for parameter in self.model.parameters():
            parameter.data = parameter.new_empty(0)

    def gradients(self) -> dict[str, Tensor]:
        """See `ShardedModel`: of this rank alone, not summed."""
        found: dict[str, Tensor] = {}
        own = dict(self._model.model.named_parameters())
        for name, experts in self._model.experts.items():
            # An expert that no token was routed to has no gradient.
            each = [own.pop(expert) for expert in experts]
            zeros = torch.zeros_like(each[0])
            found[name] = torch.stack([zeros if p.grad is None else p.grad for p in each])
        found |= {name: p.grad for name, p in own.items() if p.grad is not None}
        self._model.model.zero_grad()
        parts = self._model.parts.items()
        return {name: view_of(found, p) for name, p in parts if p.parameter in found}

    def add_up(self, path: str, gradient: Tensor) -> None:
        """See `ShardedModel`; a head norm's gradient also over the ranks that have other heads."""
        if path in self.replicated:
            super().add_up(path, gradient)
            return
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

    def _peers(self, part: TensorPart) -> list[int]:
        return self._layout.peers(self.rank, of_experts=part.by == "ep")

    def whole_shape(self, path: str) -> Sequence[int]:
        """See `ShardedModel`."""
        return self._every[path].shape

    def own_share(self, path: str, rank: int) -> Share | None:
        """See `ShardedModel`."""
        return self._every[path].index(rank, self._layout)

    def stage_group(self) -> dist.ProcessGroup | None:
        """See `ShardedModel`."""
        group: dist.ProcessGroup = group_of("tensor_and_data_parallel")
        return group

    def close(self) -> None:
        """See `ShardedModel`."""
        end_ranks()
        if self._layout.ranks == 1:
            leave_alone()
