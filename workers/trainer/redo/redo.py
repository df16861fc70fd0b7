"""Redo: from the newest valid checkpoint to the newest committed step, from the log alone.

As a database replays its write-ahead log: each step since the checkpoint is executed again from
the recorded positions, masks and borders, under the configuration of the claim in force, and its
batch and weight hashes are compared with the committed ones.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

from rlstreams.schemas.events import StepCompleted
from rlstreams.streams.log.bus import Bus
from rlstreams.streams.log.codec import decoded
from rlstreams.streams.log.errors import ConfigError
from rlstreams.streams.log.record import Position, RawRecord
from rlstreams.streams.log.topics import SCORED
from rlstreams.workers.config.load import from_json
from rlstreams.workers.trainer.intake.fetch import RecordGoneError, fetch
from rlstreams.workers.trainer.intake.payloads import Payload, payload_of
from rlstreams.workers.trainer.learn.cut import recorded_cut
from rlstreams.workers.trainer.redo.ledger import Ledger, StepFact
from rlstreams.workers.trainer.training.checkpoint import PassedOver
from rlstreams.workers.trainer.training.training import Trained, Training

T = TypeVar("T")
_UNTOLD = {"ranks": "1"}  # what a claim leaves out
Coroutine = Generator[Future[Any] | None, Any, T]
Compute = Callable[..., Future[Any]]


class RedoError(ConfigError):
    """A redone step is not what the ledger says; names the step and both hashes.

    It stops the run: another start would find the same.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Unequal:
    """A redone step with other weights than the ledger's."""

    step: int
    expected: str
    actual: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Redone:
    """What a redo found."""

    first_step: int
    last_step: int  # first_step - 1 if there was nothing to do
    num_equal: int  # steps whose weights have the recorded hash
    first_unequal: Unequal | None
    last_unequal: Unequal | None  # of the last step alone: the weights in hand are not the ledger's
    seconds: float
    passed_over: tuple[PassedOver, ...] = ()  # checkpoints that it did not start from

    @property
    def num_steps(self) -> int:
        """Steps done again."""
        return self.last_step - self.first_step + 1


def plan_redo(ledger: Ledger, saved_step: int) -> tuple[StepFact, ...]:
    """The steps that weights of `saved_step` lack, in order. Pure."""
    return tuple(ledger.steps[step] for step in range(saved_step + 1, ledger.last_step + 1))


def redo(
    bus: Bus,
    ledger: Ledger,
    training: Training,
    compute: Compute,
    *,
    while_waiting: Callable[[int], None] = lambda _: None,
    used: Callable[[Sequence[RawRecord]], None] = lambda _: None,
    stop_at_unequal: bool = False,
) -> Coroutine[Redone]:
    """Execute what the ledger has and the weights lack.

    Steps before a recorded drift do not count for `first_unequal`: the ledger goes on from the
    drift, whose branch other hardware may have taken earlier; at the drift itself it is compared.

    Args:
        while_waiting: see `fetch`; the trainer's heartbeat.
        used: called with the records of each step.
        stop_at_unequal: do nothing after the first unequal step.

    Raises:
        RedoError: another batch than recorded: the log is not the one that was trained on.
        OffsetGoneError, RecordGoneError: retention removed what redo needs.
    """
    started_s = time.monotonic()
    facts = plan_redo(ledger, training.learner.step_number)
    unequal: list[Unequal] = []
    num_done = num_equal = 0
    last: Unequal | None = None
    for fact in facts:
        event, payloads = read_step(bus, fact, while_waiting)
        used([payload.raw for payload in payloads])
        redone: Trained = yield compute(redo_step, training, ledger, fact, event, payloads)
        actual = redone.weight_hash
        del event, payloads, redone
        yield None  # before the next step's are read, also who drives us lets go of these
        is_equal = actual == fact.weight_hash
        num_done, num_equal = num_done + 1, num_equal + is_equal
        last = None
        if not is_equal:
            last = Unequal(step=fact.step, expected=fact.weight_hash, actual=actual)
            if fact.step >= ledger.drifted_step:
                unequal.append(last)
        if unequal and stop_at_unequal:
            break
    first = facts[0].step if facts else ledger.last_step + 1
    return Redone(
        first_step=first,
        last_step=first + num_done - 1,
        num_equal=num_equal,
        first_unequal=unequal[0] if unequal else None,
        last_unequal=last,
        seconds=time.monotonic() - started_s,
    )


def read_step(
    bus: Bus, fact: StepFact, while_waiting: Callable[[int], None] = lambda _: None
) -> tuple[StepCompleted, list[Payload]]:
    """A step's event, and its samples in batch order.

    Raises:
        OffsetGoneError, RecordGoneError: retention removed what redo needs.
        DecodeError: what lies there is not one of our events.
    """
    event = _event(bus, fact, while_waiting)
    positions = [Position(SCORED.name, s.partition, s.offset) for s in event.samples]
    raws = fetch(bus, positions, while_waiting=while_waiting)
    return event, [payload_of(raw, bus.schemas()) for raw in raws]


def redo_step(
    training: Training,
    ledger: Ledger,
    fact: StepFact,
    event: StepCompleted,
    payloads: Sequence[Payload],
) -> Trained:
    """One step again, as its event has it. Computes; touches no log.

    Raises:
        RedoError: another batch than recorded.
    """
    training.configure(from_json(ledger.claims[fact.epoch].config).trainer)
    cut = recorded_cut(event)
    redone = training.train(payloads, event.masked, event.policy_version - 1, cut)
    if redone.batch_hash != event.batch_hash:
        raise RedoError(
            f"step {fact.step}: its records have batch hash {redone.batch_hash}, "
            f"the ledger says {event.batch_hash}"
        )
    return redone


def drift_error(unequal: Unequal, before: Mapping[str, str], now: Mapping[str, str]) -> RedoError:
    """What `redo = "exact"` stops with.

    Args:
        before: versions that the claim of the step's epoch recorded.
        now: this process's own.
    """
    found = differences(before, now)
    why = f"since then {found}" if found else "of what a claim records, nothing differs since then"
    return RedoError(
        f"redo of step {unequal.step} gave weights {unequal.actual}, the ledger says "
        f'{unequal.expected}: {why}; restore that, or set trainer.redo = "tolerate" to go on with '
        "the new weights under a version of their own"
    )


def differences(before: Mapping[str, str], now: Mapping[str, str]) -> str:
    """`cpu_capability was AVX512 and is AVX2; threads was 1 and is 4`, or ""."""
    before, now = {**_UNTOLD, **before}, {**_UNTOLD, **now}
    names = sorted(before.keys() | now.keys())
    return "; ".join(
        f"{name} was {before.get(name, 'not recorded')} and is {now.get(name, 'not recorded')}"
        for name in names
        if before.get(name) != now.get(name)
    )


def _event(bus: Bus, fact: StepFact, while_waiting: Callable[[int], None]) -> StepCompleted:
    (raw,) = fetch(bus, [fact.position], while_waiting=while_waiting)
    event = decoded(raw, bus.schemas()).event
    if not isinstance(event, StepCompleted) or event.step != fact.step:
        raise RecordGoneError(f"{fact.position} does not hold StepCompleted({fact.step})")
    return event
