"""Redo: from the newest valid checkpoint to the newest committed step, from the log alone.

As a database replays its write-ahead log: each step since the checkpoint is executed again from
the recorded positions, masks and borders, under the configuration of the claim in force, and its
batch and weight hashes are compared with the committed ones.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from concurrent.futures import Future
from typing import Any, TypeVar

from schemas.events import StepCompleted
from streams.bus import Bus
from streams.codec import decoded
from streams.record import Position
from streams.topics import SCORED
from workers.config_load import from_json
from workers.trainer.checkpoint import CheckpointStore, Manifest
from workers.trainer.fetch import RecordGoneError, fetch
from workers.trainer.ledger import Ledger, StepFact
from workers.trainer.payloads import payload_of
from workers.trainer.training import Trained, Training

T = TypeVar("T")
Life = Generator[Future[Any] | None, Any, T]
Compute = Callable[..., Future[Any]]


class RedoError(Exception):
    """A redone step is not what the ledger says; names the step and both hashes."""


def restore(store: CheckpointStore, ledger: Ledger, training: Training) -> list[str]:
    """Load the newest checkpoint that the ledger confirms, or stay at the model folder.

    Returns:
        Why newer checkpoints were passed over, a line each.
    """

    def is_committed(manifest: Manifest) -> bool:
        fact = ledger.steps.get(manifest.step)
        return fact is not None and fact.weight_hash == manifest.weight_hash

    found = store.newest(is_committed)
    if found.manifest is not None:
        training.restore(store, found.manifest)
    return [f"{passed.name}: {passed.reason}" for passed in found.passed_over]


def redo(
    bus: Bus,
    ledger: Ledger,
    training: Training,
    compute: Compute,
    while_waiting: Callable[[], None],
) -> Life[bool]:
    """Execute what the ledger has and the weights lack; whether the last hash is the recorded one.

    Raises:
        RedoError: another batch than recorded: the log is not the one that was trained on.
        OffsetGoneError, RecordGoneError: retention removed what redo needs.
    """
    equal = True
    for step in range(training.learner.step_number + 1, ledger.last_step + 1):
        fact = ledger.steps[step]
        event = _event(bus, fact)
        positions = [Position(SCORED.name, s.partition, s.offset) for s in event.samples]
        raws = fetch(bus, positions, while_waiting=while_waiting)
        claim = ledger.claims[fact.epoch]
        training.configure(from_json(claim.config).trainer)
        before = event.policy_version - 1
        payloads = [payload_of(raw) for raw in raws]
        redone: Trained = yield compute(
            training.train, payloads, event.masked, before, event.micro_batches
        )
        if redone.batch_hash != event.batch_hash:
            raise RedoError(
                f"step {step}: its records have batch hash {redone.batch_hash}, "
                f"the ledger says {event.batch_hash}"
            )
        equal = redone.weight_hash == event.weight_hash
    return equal


def _event(bus: Bus, fact: StepFact) -> StepCompleted:
    (raw,) = fetch(bus, [fact.position])
    event = decoded(raw).event
    if not isinstance(event, StepCompleted) or event.step != fact.step:
        raise RecordGoneError(f"{fact.position} does not hold StepCompleted({fact.step})")
    return event
