"""Two ranks on the CPU, a model for them, and batches."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np

from rlstreams.schemas.events import ScoredTrajectory, Tensor
from rlstreams.workers.compute.hosts import Hosts, fingerprint, versions
from rlstreams.workers.compute.rank_server import RankServer
from rlstreams.workers.compute.team import PROGRAM, Team
from rlstreams.workers.config.trainer import OptimizerSection, TrainerSection
from rlstreams.workers.loop.log import get
from rlstreams.workers.trainer.learn.packing import Batch
from rlstreams.workers.trainer.training.training import Training
from rlstreams.workers.weights.layout import weight_hash
from tests import families
from tests.unit.trainer import trainer_builders
from tests.unit.trainer.trainer_builders import random_samples

SECRET = "of both hosts"
SECTION = TrainerSection(
    optimizer=OptimizerSection(lr=1e-2, warmup_steps=0, max_grad_norm=0.2),
    activation_checkpointing=True,
)


def make_model(folder: Path) -> Path:
    """A mixture of experts with tied embeddings."""
    return families.make("Qwen3MoeForCausalLM", folder, tie_word_embeddings=True)


def two_ranks(
    folder: Path,
    *,
    program: str = PROGRAM,
    hosts: Hosts | None = None,
    team: Team | None = None,
    **changes: object,
) -> Training:
    """In bfloat16: the smallest numbers, and the most state beside them.

    Args:
        hosts: one, which has the second rank.
        team: that has it already.
    """
    section = replace(SECTION, ranks=2, **changes)  # type: ignore[arg-type]
    team = team or Team([] if hosts else [""], program=program, hosts=hosts)
    return Training(folder, section, threads=1, dtype="bfloat16", team=team)


@contextmanager
def other_host(
    folder: Path, program: str = PROGRAM, served: list[RankServer] | None = None
) -> Iterator[Hosts]:
    """Another address of this machine that gives a rank, as this trainer asks for it.

    Args:
        served: gets what serves there.
    """
    log = get("ranks", "ranks-0", "test")
    with closing(RankServer("127.0.0.2:0", SECRET, folder, log, program=program)) as server:
        if served is not None:
            served.append(server)
        yield Hosts(
            addresses=[server.address], ranks=1, secret=SECRET, device="cpu", versions=versions(),
            model=fingerprint(folder) if folder.exists() else "",
        )  # fmt: skip


def leave(training: Training) -> None:
    """All ranks leave their group, so that the team can begin again."""
    learner = training.learner
    if learner.mesh.team is None:
        learner.close()
    else:
        learner.mesh.team.together(learner.leave, "leave", number=learner.number)


def meet_again(training: Training) -> None:
    """As after memory ran out on a rank."""
    team = training.learner.mesh.team
    assert team is not None
    training.learner.rejoin(team.new_meeting())


def hashes(training: Training) -> tuple[str, str]:
    """Of the weights, and of the optimizer's tensors."""
    learner = training.learner
    return weight_hash(learner.weights()), weight_hash(learner.optimizer_tensors())


def batch_of(
    seed: int,
    token_budget: int = 30,
    count: int = 20,
    *,
    is_routed: bool = False,
    in_bins: bool = False,
) -> Batch:
    """An odd number of micro-batches or so: then one rank is idle in the last round.

    Args:
        is_routed: tokens take experts that were recorded, drawn at random.
    """
    samples = random_samples(count, seed)
    if is_routed:
        samples = [_routed(sample, seed) for sample in samples]
    return trainer_builders.batch_of(
        samples, token_budget=token_budget, replay_routes=is_routed, in_bins=in_bins
    )


def _routed(sample: ScoredTrajectory, seed: int) -> ScoredTrajectory:
    num_rows = sum(len(s.token_ids) for s in sample.trajectory.segments) - 1
    first = np.random.default_rng(seed).integers(0, 4, (num_rows, 2, 1))
    rows = np.concatenate([first, (first + 1) % 4], -1).astype(np.uint8)
    trajectory = replace(sample.trajectory, routed_experts=Tensor.of(rows))
    return replace(sample, trajectory=trajectory)
