"""The request for a model on a mesh, and the layers that answer it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from rlstreams.workers.compute.shards import ShardedModel, TensorPlan
from rlstreams.workers.config.trainer import LayoutSection, LoraSection
from rlstreams.workers.model.routes import RouterShape


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """Properties of the model that a learner or scorer asks for."""

    folder: Path
    dtype: str
    backend: str = "fsdp2"  # or `MEGATRON`
    layout: LayoutSection = field(default_factory=LayoutSection)
    bin_tokens: int  # of a bin, or of padded rows that pass together
    asked_by: str  # section of the configuration, for messages
    learns: bool = True
    shares: bool = True  # bins hold tokens once that several sequences begin with
    recomputes: bool = False
    replay_routes: bool = False  # a mixture that cannot follow given routes is refused
    has_values: bool = False
    lora: LoraSection = field(default_factory=LoraSection)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layers:
    """The layers of a model on one rank, and how they compute."""

    plan: TensorPlan
    shards: ShardedModel
    routers: RouterShape | None  # shape that routes must fit; None: none are replayed
    why_padded: str  # reason that sequences are not packed into bins; "": they are
    why_eager: str  # reason that layers are not compiled; "": they are
    why_unshared: str  # reason that common prefixes are not shared; "": they are
