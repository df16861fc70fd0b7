"""Two ranks on the CPU, a model for them, and batches."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from rlstreams.schemas.events import ScoredTrajectory, Tensor
from rlstreams.workers.config.trainer import OptimizerSection, TrainerSection
from rlstreams.workers.trainer.learn.packing import Batch
from rlstreams.workers.trainer.parallel.team import PROGRAM, Team
from rlstreams.workers.trainer.training.training import Training
from rlstreams.workers.weights.layout import weight_hash
from tests import families
from tests.unit.trainer import trainer_builders
from tests.unit.trainer.trainer_builders import random_samples

SECTION = TrainerSection(
    optimizer=OptimizerSection(lr=1e-2, warmup_steps=0, max_grad_norm=0.2),
    activation_checkpointing=True,
)


def make_model(folder: Path) -> Path:
    """A mixture of experts with tied embeddings."""
    return families.make("Qwen3MoeForCausalLM", folder, tie_word_embeddings=True)


def two_ranks(folder: Path, *, program: str = PROGRAM, **changes: object) -> Training:
    """In bfloat16: the smallest numbers, and the most state beside them."""
    section = replace(SECTION, ranks=2, **changes)  # type: ignore[arg-type]
    team = Team([""], program=program)
    return Training(folder, section, threads=1, dtype="bfloat16", team=team)


def hashes(training: Training) -> tuple[str, str]:
    """Of the weights, and of the optimizer's tensors."""
    learner = training.learner
    return weight_hash(learner.weights()), weight_hash(learner.optimizer_tensors())


def batch_of(
    seed: int, token_budget: int = 30, count: int = 20, *, is_routed: bool = False
) -> Batch:
    """An odd number of micro-batches or so: then one rank is idle in the last round.

    Args:
        is_routed: tokens take experts that were recorded, drawn at random.
    """
    samples = random_samples(count, seed)
    if is_routed:
        samples = [_routed(sample, seed) for sample in samples]
    return trainer_builders.batch_of(samples, token_budget=token_budget, replay_routes=is_routed)


def _routed(sample: ScoredTrajectory, seed: int) -> ScoredTrajectory:
    num_rows = sum(len(s.token_ids) for s in sample.trajectory.segments) - 1
    first = np.random.default_rng(seed).integers(0, 4, (num_rows, 2, 1))
    rows = np.concatenate([first, (first + 1) % 4], -1).astype(np.uint8)
    trajectory = replace(sample.trajectory, routed_experts=Tensor.of(rows))
    return replace(sample, trajectory=trajectory)
