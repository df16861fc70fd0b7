"""Parts of the reward, from trajectories into a step's metrics."""

from __future__ import annotations

from rlstreams.workers.trainer.training.batch_metrics import MAX_PARTS, part_means


def test_parts_are_means_over_the_batch() -> None:
    """A sample without a part counts 0 for it."""
    parts = [{"form": 1.0, "right": 0.0}, {"form": 0.5}, {}, {"right": 1.0}]
    assert {"reward/form": 0.375, "reward/right": 0.25} == part_means(parts)


def test_there_are_only_so_many() -> None:
    """A verifier that makes up names does not fill the ledger."""
    assert MAX_PARTS == len(part_means([{f"{number}": 1.0} for number in range(100)]))
