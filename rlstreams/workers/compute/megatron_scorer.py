"""Built-in scorer over a megatron-core model: other layers, the same windows and versions.

A version comes under Hugging Face names and is held as the library's layers have it: queries, keys
and values in one matrix. One process on one device; rows are padded.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from rlstreams.workers.compute.score import BuiltinScorer
from rlstreams.workers.model.megatron.build import (
    RankModel,
    fill,
    join_alone,
    routers_of,
    view_of,
)
from rlstreams.workers.model.megatron.layout import Layout
from rlstreams.workers.model.megatron.score import WHY_EAGER, WHY_PADDED, MegatronScores
from rlstreams.workers.weights.layout import layout_of


class MegatronScorer(BuiltinScorer):
    """See the module; arguments and calls are those of `BuiltinScorer`.

    Raises:
        ConfigError: megatron-core is not installed, or of another line.
        EngineError: a family without a table of names.
    """

    def _load(self, folder: Path, dtype: str, replay_routes: bool) -> None:
        join_alone(str(self._device))
        self._rank_model = RankModel(folder, Layout(), 0, str(self._device), dtype)
        self._routers = routers_of(folder) if replay_routes else None
        self._scorer = MegatronScores(self._rank_model)
        self.why_padded, self.why_eager = WHY_PADDED, WHY_EAGER
        self._parts = {
            part.published or name: part for name, part in self._rank_model.parts.items()
        }
        like = torch.empty(0, dtype=getattr(torch, dtype), device="meta")
        self._layout = layout_of({n: like.new_empty(p.shape) for n, p in self._parts.items()})
        self._shapes = {n: t.to("meta") for n, t in self._rank_model.tensors.items()}
        self._tensors = {n: [t] for n, t in self._rank_model.model.named_parameters()}
        self._rank_model.tensors.clear()  # `_release` lets go of the module's own

    def _kept(
        self, pulled: Iterable[tuple[str, Tensor]], is_copied: bool
    ) -> tuple[Mapping[str, Tensor], str]:
        del is_copied  # always
        kept = {n: torch.empty_like(t, device=self._device) for n, t in self._shapes.items()}
        facts: dict[str, Tensor] = {}
        for name, tensor in pulled:
            facts[name] = tensor.to("meta")
            part = self._parts.get(name)
            if part is not None and tensor.shape == part.shape:
                fill(view_of(kept, part), tensor)
        return self._rank_model.by_parameter(kept), layout_of(facts)
