"""What is asked of a model on a mesh, and what there is then."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from rlstreams.workers.compute.shards import Plan, ShardedModel
from rlstreams.workers.config.trainer import LayoutSection, LoraSection
from rlstreams.workers.model.routes import RouterShape


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """What is asked of a model."""

    folder: Path
    dtype: str
    backend: str = "fsdp2"  # or `MEGATRON`
    layout: LayoutSection = field(default_factory=LayoutSection)
    bin_tokens: int  # of a bin, or of padded rows that pass together
    asked_by: str  # the section, for messages
    learns: bool = True
    shares: bool = True  # bins are to have tokens once that several sequences begin with
    recomputes: bool = False
    replay_routes: bool = False  # a mixture whose routers cannot be told is refused
    has_values: bool = False
    lora: LoraSection = field(default_factory=LoraSection)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layers:
    """What computes."""

    plan: Plan
    shards: ShardedModel
    routers: RouterShape | None  # that routes must fit; None: none are replayed
    why_padded: str  # why sequences are not packed into bins; "": they are
    why_eager: str  # why layers are not compiled; "": they are
    why_unshared: str  # why a bin has the tokens that several sequences begin with several times
