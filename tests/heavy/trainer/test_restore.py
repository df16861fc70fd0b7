"""What the ledger has against a checkpoint."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rlstreams.schemas.events import StepsRedone, TrainerStarted
from rlstreams.streams.ledger import Ledger
from rlstreams.streams.log.record import Position
from rlstreams.streams.log.topics import STEPS
from rlstreams.workers.trainer.training.checkpoint import CheckpointStore, Manifest, objection
from tests import factories
from tests.heavy.trainer.trainer_stand import (
    bury,
    make_config,
    make_log,
    make_trainer,
    read,
    steps,
    tick_until,
    train,
)

HASHES = {1: "a" * 64, 2: "b" * 64, 3: "c" * 64}


def claim(epoch: int) -> TrainerStarted:
    return factories.trainer_started(run="demo", epoch=epoch)


def ledger() -> Ledger:
    """Steps 1 and 2 by epoch 1, step 3 by epoch 2."""
    folded = Ledger(keeps_steps=True)
    events = [claim(1)]
    for step, weight_hash in HASHES.items():
        events += [claim(2)] if step == 3 else []
        events.append(
            factories.step_completed(
                step=step, epoch=1 + (step == 3), policy_version=step, weight_hash=weight_hash
            )
        )
    for offset, event in enumerate(events):
        assert folded.apply(event, Position("steps", 0, offset))
    return folded


def manifest(epoch: int, step: int, **changes: str) -> Manifest:
    made = Manifest(
        run="demo", epoch=epoch, step=step, policy_version=step, weight_hash=HASHES.get(step, "")
    )
    return replace(made, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (manifest(1, 2), ""),
        (manifest(2, 2), ""),  # redone by epoch 2, and saved at once
        (manifest(2, 3), ""),
        (manifest(1, 2, run="other"), "it is of run 'other', this is 'demo'"),
        (manifest(3, 3), "epoch 3 has no claim"),
        (manifest(2, 4), "step 4 is not in the ledger, whose newest is 3"),
        (manifest(1, 3), "step 3 was done in epoch 2: epoch 1, which wrote it, was fenced"),
        (manifest(1, 2, weight_hash="d" * 64), "dddddddddddd is not what the ledger committed"),
    ],
)
def test_the_ledger_objects(found: Manifest, expected: str) -> None:
    """Each reason is named; the committed weights of a valid epoch have none."""
    actual = objection("demo", ledger(), found)
    assert expected in actual
    assert bool(expected) == bool(actual)


def test_bad_checkpoints_are_passed_over_and_named(tmp_path: Path) -> None:
    """Half-written, of another run, of a fenced epoch, with other weights than it says: redo.

    The event of the redo names them, for whoever looks at the run.
    """
    log, config = make_log(), make_config(tmp_path)
    first = make_trainer(log, config)
    train(log, first, 2)
    tick_until(first, lambda: first._reporter.policy_version == 2)
    bury(first)
    store, training = CheckpointStore(tmp_path / "checkpoints"), first._training
    recorded = steps(log)[-1].weight_hash
    good = Manifest(run="demo", epoch=1, step=2, policy_version=2, weight_hash=recorded)
    weights, moments = training.learner.weights(), training.learner.optimizer_tensors()
    lying = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
    store.save(good, lying, moments)
    store.save(replace(good, epoch=9), weights, moments)
    store.save(replace(good, step=8, run="other"), weights, moments)
    (tmp_path / "checkpoints" / "000001-00000006").mkdir()
    second = make_trainer(log, config, "two", takeover=True)
    tick_until(second, lambda: second._reporter.policy_version == 2)
    assert (0, recorded) == (second._recovery.saved_step, second._training.weight_hash)
    (redone,) = (e for e in read(log, STEPS.name) if isinstance(e, StepsRedone))
    shown = redone.passed_over
    for name, reason in (
        ("000001-00000008", "it is of run 'other'"),
        ("000001-00000006", "cannot read manifest.json"),
        ("000009-00000002", "epoch 9 has no claim"),
        ("000001-00000002", "its weights have hash"),
    ):
        assert any(one.checkpoint == name and reason in one.reason for one in shown), name
    second.close()
