"""What a trainer computes with: layers of Hugging Face or of megatron-core, on one rank or several.

Everything above sees a `Learner`, whatever is below it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from rlstreams.workers.compute.learn import Learner
from rlstreams.workers.config.trainer import TrainerSection
from rlstreams.workers.engines.selfcheck import load_scorer
from rlstreams.workers.model.base import CPU
from rlstreams.workers.model.bins import use_bins
from rlstreams.workers.model.model import Numerics, numerics_of
from rlstreams.workers.model.recompute import recompute_activations
from rlstreams.workers.model.routes import RouterShape
from rlstreams.workers.model.token_scores import TokenScorer
from rlstreams.workers.trainer.learn.critic import WithValueHead, add_value_head
from rlstreams.workers.trainer.learn.trainable import trainable_of
from rlstreams.workers.trainer.training.step_cost import StepCost

if TYPE_CHECKING:
    from rlstreams.workers.compute.leader import Leader
    from rlstreams.workers.compute.team import Team


@dataclass(frozen=True, slots=True, kw_only=True)
class Computing:
    """A learner, and what is known of how it computes."""

    learner: Learner
    numerics: Numerics
    routers: RouterShape | None  # that samples' routes must fit; None: none are replayed
    cost: StepCost
    why_eager: str  # why layers are not compiled; "": they are


def over_library(
    team: Team | None,
    section: TrainerSection,
    numerics: Numerics,
    folder: Path,
    device: str,
    dtype: str,
) -> Computing:
    """Layers of Hugging Face; sharded where there is a team.

    Raises:
        ConfigError, EngineError: a model that cannot be trained so.
    """
    scorer, routers = load_scorer(
        folder, dtype, device if team is None else CPU, replay_routes=section.routing_replay
    )
    model = scorer.model
    cost = StepCost(model, numerics.device, dtype, section)
    if team is None:
        learner, why_eager = _learner(scorer, section, device)
    else:
        learner = _leader(team, section, numerics, folder, device, dtype, scorer)
        why_eager = learner.why_eager
    found, cp = numerics_of(model, numerics), section.layout.cp
    backend = f"fsdp2, cp {cp}" if cp > 1 else ""
    return Computing(
        learner=learner,
        numerics=replace(found, ranks=section.ranks, compiled=not why_eager, backend=backend),
        routers=routers,
        cost=cost,
        why_eager=why_eager,
    )


def over_megatron(
    team: Team | None,
    section: TrainerSection,
    numerics: Numerics,
    folder: Path,
    device: str,
    dtype: str,
) -> Computing:
    """Layers of megatron-core; one rank is a team of none.

    Raises:
        ConfigError, EngineError: likewise.
    """
    from rlstreams.workers.compute.team import Team
    from rlstreams.workers.model.megatron.build import routers_of, shape_of
    from rlstreams.workers.model.megatron.shims import use_megatron

    version, layout = use_megatron(), section.layout
    routers = routers_of(folder) if section.routing_replay else None
    backend = f"megatron-core {version}, tp {layout.tp}, pp {layout.pp}, ep {layout.ep}"
    learner = _leader(team or Team(()), section, numerics, folder, device, dtype)
    return Computing(
        learner=learner,
        numerics=replace(numerics, ranks=section.ranks, backend=backend),
        routers=routers,
        cost=StepCost(shape_of(folder), numerics.device, dtype, section),
        why_eager=learner.why_eager,
    )


def _learner(scorer: TokenScorer, section: TrainerSection, device: str) -> tuple[Learner, str]:
    """The learner of a trainer with one rank; why its layers are not compiled, or "".

    Raises:
        ConfigError: no layer to adapt.
    """
    trainable = trainable_of(scorer.model, section.lora)
    if section.loss.advantage == "gae":
        trainable = WithValueHead(trainable, add_value_head(scorer, device))
    why_padded, why_eager = use_bins(scorer, device, section.micro_batch_tokens)
    scorer.head.holds_logits = not (why_padded or section.activation_checkpointing)
    if section.activation_checkpointing:
        recompute_activations(scorer.model)
    learner = Learner(
        scorer.model,
        section.optimizer,
        section.loss,
        trainable=trainable,
        scorer=scorer,
        why_padded=why_padded,
    )
    return learner, why_eager


def _leader(
    team: Team,
    section: TrainerSection,
    numerics: Numerics,
    folder: Path,
    device: str,
    dtype: str,
    scorer: TokenScorer | None = None,
) -> Leader:
    """The learner of the first rank, which leads the others."""
    from rlstreams.workers.compute.leader import Leader
    from rlstreams.workers.compute.rank_learner import RankSpec

    spec = RankSpec(
        folder=folder,
        section=section,
        device=device,
        dtype=dtype,
        threads=numerics.threads,
        host=team.host,
    )
    return Leader(team, spec, scorer)
