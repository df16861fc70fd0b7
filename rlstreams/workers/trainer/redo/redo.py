"""Redo: committed steps executed again, from the log alone.

As a database replays its write-ahead log: from the recorded positions, masks and borders, under the
configuration of the claim in force. A restarted trainer does it from its checkpoint to the newest
step, and compares batch and weight hashes with the committed ones; tools do it with any step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from rlstreams.schemas.events import PassedOverCheckpoint, StepCompleted
from rlstreams.streams.ledger import Ledger, StepFact
from rlstreams.streams.log.bus import Bus
from rlstreams.streams.log.codec import decoded
from rlstreams.streams.log.errors import ConfigError
from rlstreams.streams.log.group_ids import SampleId
from rlstreams.streams.log.record import Position, RawRecord
from rlstreams.streams.log.topics import SCORED
from rlstreams.workers.config.trainer import TrainerSection
from rlstreams.workers.loop.claims import claimed_config
from rlstreams.workers.model.cut import Cut, recorded_cut
from rlstreams.workers.trainer.intake.fetch import RecordGoneError, fetch
from rlstreams.workers.trainer.intake.payloads import Payload, payload_of
from rlstreams.workers.trainer.training.resumable import Compute, Resumable, at_once
from rlstreams.workers.trainer.training.training import Trained, Training

_UNRECORDED = {"ranks": "1"}  # values of facts that a claim leaves out


class RedoError(ConfigError):
    """A redone step is not the ledger's; names the step and both hashes.

    It stops the run: another start would find the same.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Unequal:
    """A redone step with other weights than the ledger's."""

    step: int
    expected: str
    actual: str
    value_heads: tuple[str, str] = ("", "")  # expected and actual, where these alone differ

    @property
    def part(self) -> tuple[str, str, str]:
        """The part that differs, and its expected and actual hash."""
        if self.expected == self.actual:
            return ("a value head", *self.value_heads)
        return "weights", self.expected, self.actual


@dataclass(frozen=True, slots=True, kw_only=True)
class Redone:
    """Result of a redo."""

    first_step: int
    last_step: int  # first_step - 1 if there was nothing to redo
    num_equal: int  # steps whose weights have the recorded hash
    first_unequal: Unequal | None
    last_unequal: Unequal | None  # if it is the last step: the weights in hand are not the ledger's
    seconds: float
    passed_over: tuple[PassedOverCheckpoint, ...] = ()  # checkpoints that it did not start from

    @property
    def num_steps(self) -> int:
        """Number of redone steps."""
        return self.last_step - self.first_step + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RedoneStep:
    """A committed step, and its result now."""

    fact: StepFact
    recorded: StepCompleted
    payloads: Sequence[Payload]  # in batch order
    again: Trained

    @property
    def is_equal(self) -> bool:
        """Whether weights, and a critic's value head, are those that the run went on with."""
        heads = self.value_heads
        return self.again.weight_hash == self.fact.weight_hash and heads[0] == heads[1]

    @property
    def value_heads(self) -> tuple[str, str]:
        """Hash of the recorded value head and of this one; equal after a drift, whose head is not
        in the log."""
        has_drifted = self.fact.weight_hash != self.recorded.weight_hash
        now = self.again.value_head_hash
        return (now if has_drifted else self.recorded.value_head_hash), now

    @property
    def unequal(self) -> Unequal | None:
        """The difference from the ledger; None: it is equal."""
        if self.is_equal:
            return None
        return Unequal(
            step=self.fact.step,
            expected=self.fact.weight_hash,
            actual=self.again.weight_hash,
            value_heads=self.value_heads,
        )

    def check_batch(self) -> None:
        """
        Raises:
            RedoError: the batch is not the recorded one: the log is not the one that was trained
                on.
        """
        if self.again.batch_hash != self.recorded.batch_hash:
            raise RedoError(
                f"step {self.fact.step}: its records have batch hash {self.again.batch_hash}, "
                f"the ledger says {self.recorded.batch_hash}"
            )


def _tried(work: Callable[..., StepRecords], *given: object) -> Future[StepRecords]:
    """As `at_once`; an error waits until the result is asked for: a redo may end before."""
    future: Future[StepRecords] = Future()
    try:
        future.set_result(work(*given))
    except Exception as err:  # noqa: BLE001  (raised by `result`)
        future.set_exception(err)
    return future


def redo_steps(
    bus: Bus,
    ledger: Ledger,
    training: Training,
    first: int,
    last: int,
    *,
    change: TrainerSection | None = None,
    code: Mapping[str, str] | None = None,
    compute: Compute = at_once,
    while_waiting: Callable[[int], None] = lambda _: None,
    on_step: Callable[[RedoneStep], bool | None],
) -> Resumable[None]:
    """Execute committed steps again, from weights as they were before `first`; writes nothing.

    Records, masks and borders are the recorded ones, the configuration that of the claim in force.
    A step that its trainer disowned is skipped. While a step is computed, the records of the next
    one are read; they are decoded when its turn comes, so one step's samples are held at a time.

    Args:
        ledger: one that keeps its steps.
        change: a configuration to use instead; if it cuts micro-batches otherwise they are cut
            anew.
        code: source of the user's functions that train to use with `change`; None: the claim's.
        while_waiting: see `fetch`; the trainer's heartbeat.
        on_step: called with each step; False ends the redo.

    Raises:
        OffsetGoneError, RecordGoneError: retention removed a record that redo needs.
        DecodeError: a record is not one of our events.
    """
    made = [n for n in range(first, last + 1) if not ledger.is_disowned(n)]
    after = dict(pairwise(made))
    ahead: Future[StepRecords] | None = None
    for number in range(first, last + 1):
        fact = ledger.steps[number]
        if ledger.is_disowned(number):  # its number is used, without weights
            training.pass_over()
            continue
        claim = ledger.claims[fact.epoch]
        section = claimed_config(claim).trainer
        records = ahead.result() if ahead else records_of(bus, fact, while_waiting)
        ahead = None
        event, payloads = records.event, records.payloads(bus)
        del records
        cut: Cut | None = recorded_cut(event)
        if change and _cut_by(change) != _cut_by(section):
            cut = None
        by = change or section, claim.code if code is None else code
        given = (training, *by, event, payloads, cut)
        computed = compute(train_recorded, *given)
        if number in after:
            ahead = _tried(records_of, bus, ledger.steps[after[number]], while_waiting)
        again: Trained = yield computed
        step = RedoneStep(fact=fact, recorded=event, payloads=payloads, again=again)
        goes_on = on_step(step)
        del event, payloads, given, computed, again, step
        yield None  # releases these, here and in the caller, before the next step's are read
        if goes_on is False:
            return


def _cut_by(section: TrainerSection) -> tuple[object, ...]:
    """Settings that decide the micro-batches of a batch."""
    return section.micro_batch_tokens, section.minibatches, section.shared_prefixes


def train_recorded(
    training: Training,
    section: TrainerSection,
    code: Mapping[str, str],
    event: StepCompleted,
    payloads: Sequence[Payload],
    cut: Cut | None,
    left_out: Collection[SampleId] = (),
) -> Trained:
    """Learn from a recorded batch under this configuration; raises as `Training.train`.

    Args:
        code: source of the user's functions that train.
        left_out: see `Training.train`.
    """
    training.configure(section, code)
    version = event.policy_version - 1
    return training.train(payloads, event.masked, version, cut, left_out)


def redo(
    bus: Bus,
    ledger: Ledger,
    training: Training,
    compute: Compute,
    *,
    while_waiting: Callable[[int], None],
    used: Callable[[Sequence[RawRecord]], None],
    stop_at_unequal: bool,
) -> Resumable[Redone]:
    """Redo the ledger's steps that the weights lack.

    Steps before a recorded drift do not count for `first_unequal`: the ledger goes on from the
    drift, whose branch other hardware may have taken earlier; at the drift itself it is compared.

    Args:
        while_waiting: see `redo_steps`.
        used: called with the records of each step.
        stop_at_unequal: do nothing after the first unequal step.

    Raises:
        RedoError: a batch is not the recorded one: the log is not the one that was trained on.
        OffsetGoneError, RecordGoneError: retention removed a record that redo needs.
    """
    started_s = time.monotonic()
    first = training.learner.step_number + 1
    done: list[Unequal | None] = []  # None: equal

    def compare(step: RedoneStep) -> bool:
        step.check_batch()
        used([payload.raw for payload in step.payloads])
        done.append(step.unequal)
        return step.is_equal or not stop_at_unequal or step.fact.step < ledger.drifted_step

    yield from redo_steps(
        bus,
        ledger,
        training,
        first,
        ledger.last_step,
        compute=compute,
        while_waiting=while_waiting,
        on_step=compare,
    )
    unequal = [one for one in done if one and one.step >= ledger.drifted_step]
    return Redone(
        first_step=first,
        last_step=first + len(done) - 1,
        num_equal=done.count(None),
        first_unequal=unequal[0] if unequal else None,
        last_unequal=done[-1] if done else None,
        seconds=time.monotonic() - started_s,
    )


class StepRecords(NamedTuple):
    """A step's event, and the records of its samples in batch order."""

    event: StepCompleted
    raws: Sequence[RawRecord]

    def payloads(self, bus: Bus) -> list[Payload]:
        """The samples, decoded.

        Raises:
            DecodeError, RecordGoneError: see `payload_of`.
        """
        return [payload_of(raw, bus.schemas()) for raw in self.raws]


def records_of(bus: Bus, fact: StepFact, while_waiting: Callable[[int], None]) -> StepRecords:
    """The records of a step; raises as `fetch`."""
    event = read_completed(bus, fact, while_waiting)
    positions = [Position(SCORED.name, s.partition, s.offset) for s in event.samples]
    return StepRecords(event, fetch(bus, positions, while_waiting=while_waiting))


def read_step(
    bus: Bus, fact: StepFact, while_waiting: Callable[[int], None]
) -> tuple[StepCompleted, list[Payload]]:
    """A step's event, and its samples in batch order."""
    records = records_of(bus, fact, while_waiting)
    return records.event, records.payloads(bus)


def read_completed(
    bus: Bus, fact: StepFact, while_waiting: Callable[[int], None] = lambda _: None
) -> StepCompleted:
    """A step's event.

    Raises:
        RecordGoneError: the position holds another record.
    """
    (raw,) = fetch(bus, [fact.position], while_waiting=while_waiting)
    event = decoded(raw, bus.schemas()).event
    if not isinstance(event, StepCompleted) or event.step != fact.step:
        raise RecordGoneError(f"{fact.position} does not hold StepCompleted({fact.step})")
    return event


def drift_error(
    unequal: Unequal,
    before: Mapping[str, str],
    now: Mapping[str, str],
    code: Collection[str] = (),
) -> RedoError:
    """The error that stops a redo under `redo = "exact"`.

    Args:
        before: versions that the claim of the step's epoch recorded.
        now: this process's own.
        code: the user's code in that claim, as `FIELD: PATH`.
    """
    found = differences(before, now)
    why = f"since then {found}" if found else "of what a claim records, nothing differs since then"
    own = (
        f"; or code of yours keeps something between calls, or draws random numbers "
        f"({', '.join(sorted(code))}): a redo begins in the middle, with what it returned alone"
    )
    what, expected, actual = unequal.part
    return RedoError(
        f"redo of step {unequal.step} gave {what} {actual}, the ledger says "
        f'{expected}: {why}; restore that, or set trainer.redo = "tolerate" to go on with '
        f"the new weights under a version of their own{own if code else ''}"
    )


def differences(before: Mapping[str, str], now: Mapping[str, str]) -> str:
    """Text as `cpu_capability was AVX512 and is AVX2; threads was 1 and is 4`, or ""."""
    before, now = {**_UNRECORDED, **before}, {**_UNRECORDED, **now}
    names = sorted(before.keys() | now.keys())
    return "; ".join(
        f"{name} was {before.get(name, 'not recorded')} and is {now.get(name, 'not recorded')}"
        for name in names
        if before.get(name) != now.get(name)
    )
