"""Computing parts of a trainer: a learner on a mesh, and the facts of its numerics and cost."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from rlstreams.workers.compute.learn import Learner, LearnerSpec
from rlstreams.workers.compute.mesh import Mesh
from rlstreams.workers.config.trainer import MEGATRON, TrainerSection
from rlstreams.workers.engines.selfcheck import load_scorer
from rlstreams.workers.model.base import CPU
from rlstreams.workers.model.model import Numerics, numerics_of
from rlstreams.workers.model.routes import RouterShape
from rlstreams.workers.trainer.training.step_cost import StepCost

if TYPE_CHECKING:
    from rlstreams.workers.compute.team import Team


@dataclass(frozen=True, slots=True, kw_only=True)
class Computing:
    """A learner, and the facts of its numerics and cost."""

    learner: Learner
    numerics: Numerics
    routers: RouterShape | None  # shape that routes must fit; None: none are replayed
    cost: StepCost


def computing_of(
    team: Team | None,
    section: TrainerSection,
    numerics: Numerics,
    folder: Path,
    device: str,
    dtype: str,
) -> Computing:
    """The computing parts that the section asks for.

    Raises:
        ConfigError, EngineError: a model that cannot be trained so.
    """
    spec = LearnerSpec(
        folder=folder,
        section=section,
        device=device,
        dtype=dtype,
        threads=numerics.threads,
        host="" if team is None else team.host,
    )
    begin = _over_megatron if section.backend == MEGATRON else _over_library
    made = begin(team, spec, numerics)
    ranks = replace(made.numerics, ranks=section.ranks)
    return replace(made, numerics=ranks)


def _over_library(team: Team | None, spec: LearnerSpec, numerics: Numerics) -> Computing:
    """Layers of Hugging Face; sharded if there is a team."""
    section, place = spec.section, spec.device if team is None else CPU
    scorer, routers = load_scorer(
        spec.folder, spec.dtype, place, replay_routes=section.routing_replay
    )
    model, cp = scorer.model, section.layout.cp
    cost = StepCost(model, numerics.device, spec.dtype, section)  # of the whole model
    if team is None:
        learner = spec.begin(Mesh(device=spec.device), scorer)
    else:
        learner = team.begin(spec, lambda mesh: spec.begin(mesh, scorer))
    words = [f"cp {cp}"] * (cp > 1) + ["one sum an update"] * (
        learner.sums_once and team is not None
    )
    backend = ", ".join(["fsdp2", *words]) if words else ""
    found = replace(numerics_of(model, numerics), compiled=not learner.why_eager, backend=backend)
    return Computing(learner=learner, numerics=found, routers=routers, cost=cost)


def _over_megatron(team: Team | None, spec: LearnerSpec, numerics: Numerics) -> Computing:
    """Layers of megatron-core."""
    from rlstreams.workers.model.megatron.build import routers_of, shape_of
    from rlstreams.workers.model.megatron.shims import use_megatron

    version, section = use_megatron(), spec.section
    layout = section.layout
    routers = routers_of(spec.folder) if section.routing_replay else None
    backend = f"megatron-core {version}, tp {layout.tp}, pp {layout.pp}, ep {layout.ep}"
    mesh = Mesh(device=spec.device)
    learner = spec.begin(mesh) if team is None else team.begin(spec, spec.begin)
    return Computing(
        learner=learner,
        numerics=replace(numerics, backend=backend),
        routers=routers,
        cost=StepCost(shape_of(spec.folder), numerics.device, spec.dtype, section),
    )
