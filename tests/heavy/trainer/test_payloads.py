"""Memory is bounded, whatever waits: payloads, polls, and what is read again by position."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest

from rlstreams.schemas.events import ClosedGroups, DeadLetter, ScoredTrajectory, Trajectory
from rlstreams.streams.log.record import Partition, Position, RawRecord
from rlstreams.streams.log.topics import SCORED
from rlstreams.workers.loop.stall import StuckError
from rlstreams.workers.trainer.intake.fetch import PollSize
from rlstreams.workers.trainer.intake.payloads import Payload
from rlstreams.workers.trainer.learn.packing import MicroBatch
from rlstreams.workers.trainer.redo.redo import StepRecords
from rlstreams.workers.trainer.training.training import Trained, Training, UntrainableSample
from rlstreams.workers.trainer.worker import TrainerWorker
from tests import factories
from tests.heavy.trainer.trainer_stand import (
    bury,
    make_config,
    make_log,
    make_trainer,
    run_steps,
    scored,
    send,
    steps,
    tick_until,
    train,
)
from tests.memory.bus import MemoryBus
from tests.memory.consumer import MemoryReader
from tests.unit.roles.stand import DEADLINE_S

LIMIT_BYTES = 1_000_000
NUM_GROUPS = 60
PADDING = "x" * 20_000  # carried along in the record, never looked at


def raw(size: int) -> RawRecord:
    return RawRecord(position=Position(SCORED.name, 0, 0), offsets=(0,), key=b"", value=bytes(size))


def test_a_poll_asks_for_what_fits() -> None:
    """One record at first, twice as many each time, and fewer once a large one was seen."""
    size, asked = PollSize(budget_bytes=1000), []
    for num_bytes in (10, 10, 10, 300, 10, 5000, 10):
        asked.append(size.num_records)
        size.saw([raw(num_bytes)])
    assert [1, 2, 4, 8, 3, 3, 1] == asked
    size.saw([])
    assert 1 == size.num_records


def num_read(trainer: TrainerWorker) -> int:
    """Offsets of scored-trajectories that it is past."""
    return sum(at for p, at in trainer._samples.positions().items() if p.topic == SCORED.name)


def held_bytes(trainer: TrainerWorker) -> int:
    return sum(len(payload.raw.value) for payload in trainer._samples._payloads._held.values())


def test_a_trainer_that_waits_holds_no_more_than_its_buffer(tmp_path: Path) -> None:
    """Groups that lack a sample pile up in the log, not here; later they are trained from there."""
    log, config = make_log(), make_config(tmp_path, trainer__buffer_mb=1, trainer__max_staleness=9)
    late = [scored(group, 1, 0) for group in range(3)]
    send(log, *(scored(group, 0, 0, engine=PADDING) for group in range(NUM_GROUPS, 0, -1)))
    send(log, scored(0, 0, 0, engine=PADDING))
    trainer = make_trainer(log, config)
    peak = 0
    while trainer._samples._admission.num_open_groups <= NUM_GROUPS:
        trainer.tick()
        peak = max(peak, held_bytes(trainer))
    assert 0.9 * LIMIT_BYTES < peak <= LIMIT_BYTES
    assert NUM_GROUPS * len(PADDING) > 1.1 * LIMIT_BYTES
    send(log, *late)
    run_steps(log, trainer, 3)
    tick_until(trainer, lambda: trainer.done)
    trainer.close()
    assert [["0", "0"], ["1", "1"], ["2", "2"]] == [
        [ref.group_id for ref in step.samples] for step in steps(log)
    ]


class SlowLog(MemoryBus):
    """What is read again comes one record at a time, and at times nothing does."""

    is_blocked = False

    def reader(self, offsets: Mapping[Partition, int] | None = None) -> MemoryReader:
        reader = super().reader(offsets)
        if offsets is None:  # `fetch` seeks
            poll = reader.poll

            def slow_poll(max_records: int, timeout_s: float) -> Sequence[RawRecord]:
                time.sleep(POLL_S)
                return [] if self.is_blocked else poll(1, timeout_s)

            reader.poll = slow_poll  # type: ignore[method-assign]
        return reader


POLL_S, STALL_S, NUM_BETWEEN = 0.05, 1.0, 40


@pytest.mark.parametrize("is_blocked", [False, True])
def test_a_long_read_is_no_stall_as_long_as_records_come(tmp_path: Path, is_blocked: bool) -> None:
    """Between two samples of a step lie as many of other groups as take twice `stall_s` to read."""
    limits = {"trainer__buffer_mb": 1, "trainer__steps": 1, "deadlines__stall_s": STALL_S}
    log, beats = make_log(), list[float]()
    bus, config = SlowLog(log, "demo"), make_config(tmp_path, **limits)
    bus.is_blocked = is_blocked
    others = (scored(group, 0, 0, engine=PADDING) for group in range(1, NUM_BETWEEN + 1))
    big = "x" * 1_100_000
    send(log, scored(0, 0, 0, engine=big), *others, scored(0, 1, 0, engine=big))
    trainer = make_trainer(log, config, bus=bus, beat=lambda: beats.append(time.monotonic()))
    if is_blocked:
        with pytest.raises(StuckError, match="trainer-0 says 'working step 1'"):
            tick_until(trainer, lambda: trainer.done)
        assert [] == beats
    else:
        tick_until(trainer, lambda: trainer.done)
        assert len(beats) > NUM_BETWEEN
        assert beats[-1] - beats[0] > STALL_S
    trainer.close()


@pytest.fixture
def few_objects() -> None:
    """What is there by now is not looked through: with torch that takes seconds, each time."""
    gc.collect()
    gc.freeze()


def living() -> list[object]:
    """What holds a sample's bytes, of every kind that the trainer makes; since `few_objects`."""
    gc.collect()
    kinds = (Payload, ScoredTrajectory, Trajectory, MicroBatch, DeadLetter)
    return [found for found in gc.get_objects() if isinstance(found, kinds)]


@pytest.mark.usefixtures("few_objects")
def test_a_trainer_that_waits_holds_nothing_of_what_is_closed(tmp_path: Path) -> None:
    """Trained, dropped, late, a copy or refused: the next step may be minutes away."""
    assert [] == living()
    log, config = make_log(), make_config(tmp_path, trainer__max_staleness=9, trainer__steps=9)
    trainer = make_trainer(log, config)
    refused = scored(2, 1, 0, reward=float("nan"))
    send(log, *(scored(group, n, 0) for group in (0, 1) for n in range(2)), scored(1, 0, 0))
    send(log, scored(2, 0, 0), refused)
    assert {ScoredTrajectory, Trajectory} == {type(found) for found in living()}
    del refused
    run_steps(log, trainer, 2)
    read = num_read(trainer)
    send(log, scored(0, 1, 0))
    tick_until(trainer, lambda: num_read(trainer) > read)
    tick_until(trainer, lambda: trainer._writer.state == "waiting")
    assert ClosedGroups(watermark=3) == trainer._samples._admission.closed
    assert [] == living()
    trainer.close()


def trajectories() -> int:
    return sum(isinstance(found, Trajectory) for found in living())


class Counting(Training):
    """Counts the samples in memory at each step's begin."""

    counts: ClassVar[list[int]] = []

    def train(self, *args: Any) -> Trained:
        self.counts.append(trajectories())
        return super().train(*args)


@pytest.mark.usefixtures("few_objects")
def test_a_redo_holds_one_step_s_samples_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does the steps since a checkpoint one after another, however many there are."""
    counts: list[int] = []

    decode = StepRecords.payloads

    def counted(*args: Any) -> Any:
        counts.append(trajectories() - before)
        return decode(*args)

    monkeypatch.setattr(StepRecords, "payloads", counted)
    log, config = make_log(), make_config(tmp_path)
    first = make_trainer(log, config)
    train(log, first, 3)
    bury(first)
    del first
    before = trajectories()  # of other tests
    Counting.counts.clear()
    second = make_trainer(log, config, "two", takeover=True, hardware=Counting)
    tick_until(second, lambda: second._reporter.policy_version == 3)
    second.close()
    assert [2, 2, 2] == [count - before for count in Counting.counts]
    assert [0, 0, 0] == counts  # nothing is left of a step when the next one is decoded


class Slow(Training):
    """A step that takes until it is told."""

    begun, go_on = threading.Event(), threading.Event()

    def try_train(self, *args: Any) -> Trained | tuple[UntrainableSample, ...]:
        self.begun.set()
        assert self.go_on.wait(DEADLINE_S)
        return super().try_train(*args)


def test_a_sample_that_comes_while_its_group_is_trained_is_let_go(tmp_path: Path) -> None:
    """Its letter came first, so the step goes without it; nobody will ask for it again."""
    log, config = make_log(), make_config(tmp_path, trainer__min_group_samples=1)
    Slow.begun.clear()
    Slow.go_on.clear()
    trainer = make_trainer(log, config, hardware=Slow)
    send(log, factories.dead_letter(group_id="0", sample=1, row=0), scored(0, 0, 0))
    tick_until(trainer, Slow.begun.is_set)
    send(log, scored(0, 1, 0))
    tick_until(trainer, lambda: trainer._samples._intake.num_samples == 2)
    Slow.go_on.set()
    run_steps(log, trainer, 1)
    assert [["reward"]] == [[absent.reason for absent in step.absent] for step in steps(log)]
    assert 0 == held_bytes(trainer)
    trainer.close()
