"""What leaving samples out does to a gradient: theirs is gone, and nothing else is another."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rlstreams.schemas.events import MaskedSegment
from rlstreams.workers.compute.learn import Learner
from rlstreams.workers.config.loss import LossSection
from rlstreams.workers.config.trainer import OptimizerSection
from rlstreams.workers.model.model import configure_torch
from tests.unit.trainer.trainer_builders import TinyModel, batch_of, random_samples

configure_torch(1)
UNCLIPPED = OptimizerSection(lr=1e-2, warmup_steps=0, max_grad_norm=1e9)
LOSSES: dict[str, dict[str, Any]] = {
    "token": {},
    "sequence": {"kind": "gspo", "reduce": "sequence"},
    "constant": {"reduce": "constant", "constant_tokens": 8},
    "entropy": {"entropy_coef": 0.5},  # a term that no advantage of 0 takes away
}
SAMPLES = random_samples(12)
MASKED = (MaskedSegment(group_id="0", sample=1, segment=1, staleness=3),)
NAMES = frozenset((s.trajectory.group_id, s.trajectory.sample) for s in SAMPLES)


def gradient(by: LossSection, left_out=(), **options) -> dict[str, torch.Tensor]:
    batch = batch_of(SAMPLES, MASKED, by, left_out=left_out, **options)
    learner = Learner.of(TinyModel(), UNCLIPPED, by)
    learner._gradient(learner._prepared(batch))
    return {name: tensor.clone() for name, tensor in learner._adam.gradients.items()}


@pytest.mark.parametrize("name", LOSSES)
def test_the_parts_of_a_gradient_add_up(name: str) -> None:
    """Without a set, and of that set alone: together they are the whole, in every reduction."""
    by = LossSection(**LOSSES[name])
    some = frozenset(n for n in NAMES if n[0] == "1") | {("2", 0)}
    whole, rest, own = gradient(by), gradient(by, some), gradient(by, NAMES - some)
    for parameter, tensor in whole.items():
        torch.testing.assert_close(rest[parameter] + own[parameter], tensor, atol=1e-6, rtol=1e-5)
        assert not torch.equal(rest[parameter], tensor), parameter


def test_a_mini_batch_without_a_sample_is_no_update() -> None:
    """And a batch without any is refused: its step is passed over."""
    batch = batch_of(SAMPLES, minibatches=3, left_out={n for n in NAMES if n[0] == "1"})
    assert [{0}, {2}] == [
        {batch.minibatches[index] for index in members} for members in batch.updates
    ]
    with pytest.raises(ValueError, match="no token to learn from"):
        batch_of(SAMPLES, left_out=NAMES)
