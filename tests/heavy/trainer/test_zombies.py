"""A trainer that slept while its successor worked changes nothing when it wakes up."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors import SafetensorError

from rlstreams.schemas.events import (
    ClosedGroups,
    PartitionPosition,
    PolicyPublished,
    RedoDrifted,
)
from rlstreams.streams.audit.auditor import audit
from rlstreams.streams.log.codec import outgoing
from rlstreams.streams.log.crash_points import CrashPoint, arm
from rlstreams.streams.log.errors import BrokerError, FencedError, OffsetGoneError
from rlstreams.streams.log.topics import POLICY_VERSIONS, SCORED, STEPS
from rlstreams.workers.loop.runtime import Exit, exit_status
from rlstreams.workers.loop.stall import StuckError
from rlstreams.workers.trainer.claim import read_ledger
from rlstreams.workers.trainer.intake.fetch import RecordGoneError
from rlstreams.workers.trainer.redo.redo import RedoError
from rlstreams.workers.trainer.training.checkpoint import CheckpointStore
from rlstreams.workers.trainer.worker import TrainerWorker
from rlstreams.workers.weights.file import FileWeightChannel
from tests.factories import sample_ref, step_completed, trainer_started
from tests.heavy.trainer.trainer_stand import (
    finish,
    make_config,
    make_log,
    make_trainer,
    read,
    scored,
    send,
    steps,
    tick_until,
)
from tests.memory.bus import MemoryBus
from tests.memory.log import MemoryLog

WAIT_S = 20.0


class Sleep:
    """As SIGSTOP does: from a crash point on, all threads of the trainer stand still."""

    def __init__(self, trainer: TrainerWorker, point: CrashPoint, count: int) -> None:
        self._pools = trainer._compute_thread, trainer._recovery._files
        self._point = point
        self._left = count
        self.driver: threading.Thread | None = None
        self.asleep = threading.Event()
        self.wake = threading.Event()

    def drive(self, trainer: TrainerWorker) -> None:
        """Tick after tick in a thread of its own."""
        self.driver = threading.current_thread()
        tick_until(trainer, lambda: trainer.done)

    def __call__(self, point: CrashPoint) -> None:
        own = {thread for pool in self._pools for thread in pool._threads}
        if threading.current_thread() not in {self.driver, *own}:
            return
        self._left -= point == self._point
        if self._left <= 0:
            self.asleep.set()
            assert self.wake.wait(WAIT_S)


@pytest.mark.parametrize(
    ("point", "count"),
    [
        (CrashPoint.FORWARD_BEFORE, 2),
        (CrashPoint.FORWARD_AFTER, 2),
        (CrashPoint.BEGIN_AFTER, 6),
        (CrashPoint.SEND_AFTER, 6),
        (CrashPoint.COMMIT_BEFORE, 6),
        (CrashPoint.CHECKPOINT_BEFORE, 1),
        (CrashPoint.CHECKPOINT_WRITTEN, 1),
        (CrashPoint.POLL_BEFORE, 5),
    ],
)
def test_it_changes_nothing(tmp_path: Path, point: CrashPoint, count: int) -> None:
    """Wherever it slept: no step, no version, no weights, no checkpoint; then it is fenced."""
    log = make_log()
    config = make_config(tmp_path, trainer__max_staleness=3, trainer__checkpoint_every=1)
    send(log, *(scored(group, sample, 0) for group in range(3) for sample in range(2)))
    zombie = make_trainer(log, config)
    sleep = Sleep(zombie, point, count)
    arm(sleep)
    with ThreadPoolExecutor(1) as thread:
        driven = thread.submit(sleep.drive, zombie)
        assert sleep.asleep.wait(WAIT_S)
        finish(log, config)
        before = read(log, STEPS.name), read(log, POLICY_VERSIONS.name)
        sleep.wake.set()
        error = driven.exception(WAIT_S)
    zombie.close()
    assert isinstance(error, FencedError)
    assert before == (read(log, STEPS.name), read(log, POLICY_VERSIONS.name))
    check_weights(log)
    newest = CheckpointStore(tmp_path / "checkpoints").newest(lambda _: "")
    assert (2, 3) == (newest.manifest.epoch, newest.manifest.step)


def test_it_prunes_nothing_once_it_was_replaced(tmp_path: Path) -> None:
    """It slept with its checkpoint in place and the older one still there: the successor may hold
    on to either, or be reading it."""
    log = make_log()
    config = make_config(
        tmp_path,
        trainer__max_staleness=3,
        trainer__checkpoint_every=1,
        trainer__checkpoints_kept=1,
    )
    send(log, *(scored(group, sample, 0) for group in range(3) for sample in range(2)))
    zombie = make_trainer(log, config)
    sleep = Sleep(zombie, CrashPoint.CHECKPOINT_AFTER, 2)
    arm(sleep)
    keeping = make_config(tmp_path, trainer__max_staleness=3, trainer__checkpoints_kept=9)
    with ThreadPoolExecutor(1) as thread:
        driven = thread.submit(sleep.drive, zombie)
        assert sleep.asleep.wait(WAIT_S)
        finish(log, keeping)
        before = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
        sleep.wake.set()
        error = driven.exception(WAIT_S)
    zombie.close()
    assert isinstance(error, FencedError)
    assert before == ["000001-00000001", "000001-00000002", "000002-00000003"]
    assert before == sorted(path.name for path in (tmp_path / "checkpoints").iterdir())


@pytest.mark.parametrize(
    "met",
    [
        OffsetGoneError("scored-trajectories[0]@0 is gone"),
        RecordGoneError("scored-trajectories[0]@0 holds no committed record"),
        RedoError("step 2: its records have another batch hash"),
        TimeoutError("scored-trajectories[0]@0: nothing was read for 120 s"),
        SafetensorError("Error while serializing: No such file or directory"),
        OSError(39, "Directory not empty"),
    ],
    ids=lambda met: type(met).__name__,
)
def test_whatever_it_meets_when_it_wakes_it_was_fenced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, met: Exception
) -> None:
    """Records have expired, files are gone, deadlines are over; and that is not why it ends."""
    log, config = make_log(), make_config(tmp_path, trainer__steps=1)
    zombie = make_trainer(log, config)
    tick_until(zombie, lambda: zombie._reporter.policy_version == 0)

    def poll(_timeout_s: float) -> None:
        raise met

    monkeypatch.setattr(zombie._samples._intake, "poll", poll)
    with pytest.raises(type(met)) as told:
        zombie.tick()  # nobody took over: that is the reason
    assert told.value is met
    send(log, *(scored(0, sample, 0) for sample in range(2)))
    finish(log, config)
    with pytest.raises(FencedError) as fenced:
        zombie.tick()
    zombie.close()
    assert fenced.value.__cause__ is met
    assert Exit.FENCED == exit_status(fenced.value)


def test_what_it_cannot_ask_is_not_the_reason_either(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the broker does not answer, the first error is told."""
    log, config = make_log(), make_config(tmp_path)
    trainer = make_trainer(log, config)
    asked: list[object] = []

    def fail(error: Exception) -> Callable[..., None]:
        def raise_it(*args: object) -> None:
            asked.append(args)
            raise error

        return raise_it

    monkeypatch.setattr(trainer._samples._intake, "poll", fail(OSError("disk full")))
    monkeypatch.setattr(trainer._writer, "prove", fail(BrokerError("no broker")))
    with pytest.raises(OSError, match="disk full") as told:
        trainer.tick()
    assert ["whether it was replaced could not be asked: no broker"] == getattr(
        told.value, "__notes__", []
    )
    asked.clear()
    monkeypatch.setattr(trainer._samples._intake, "poll", fail(BrokerError("down")))
    with pytest.raises(BrokerError, match="down"):
        trainer.tick()
    trainer.close()
    assert 1 == len(asked)  # a broker that failed is not asked once more


def test_who_is_stuck_says_so_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it reports with would only say once more that it is stuck."""
    log, config = make_log(), make_config(tmp_path)
    trainer = make_trainer(log, config)

    def look(*_args: object) -> None:
        raise StuckError("trainer-0 has done nothing for 300 s")

    monkeypatch.setattr(trainer._reporter._stuck, "look", look)
    with pytest.raises(StuckError) as told:
        trainer.tick()
    trainer.close()
    assert not getattr(told.value, "__notes__", [])


@pytest.mark.parametrize("is_before", [False, True], ids=["behind its own step", "before it"])
def test_a_step_that_a_stranger_wrote_in_its_name_ends_a_trainer(
    tmp_path: Path, is_before: bool
) -> None:
    """Everything of it counts: epoch, instance, number. The trainer disowns it (75) before it makes
    another; the next start passes over it, also where retention has what it names, gives its own
    weights a new version, and every sample is trained once."""
    log, config = make_log(), make_config(tmp_path, trainer__max_staleness=4)
    trainer = make_trainer(log, config)
    tick_until(trainer, lambda: trainer._reporter.policy_version == 0)
    send(log, *(scored(group, sample, 0) for group in range(3) for sample in range(2)))
    if not is_before:
        tick_until(trainer, lambda: bool(steps(log)))
    theirs = replace(
        step_completed(len(steps(log)) + 1, samples=(sample_ref("2", 0, offset=-1),)),
        run="demo",
        instance=trainer._context.instance,
        closed=ClosedGroups(watermark=3),
        positions=(PartitionPosition(topic=SCORED.name, partition=0, offset=99),),
    )
    MemoryBus(log, "demo").producer("stranger").commit([outgoing(STEPS, theirs)])

    with pytest.raises(
        FencedError, match=rf"StepCompleted of step {theirs.step} at steps.* not wr"
    ):
        tick_until(trainer, lambda: len(steps(log)) > 3)
    trainer.close()

    assert len([step for step in steps(log) if step.weight_hash != theirs.weight_hash]) <= 2
    finish(log, config)
    report = audit(MemoryBus(log, "demo"), settle_s=0.0)
    assert 1 == report.breach_counts["forged step"]
    assert 0 == report.trained_twice
    ledger = read_ledger(MemoryBus(log, "demo"), "test")
    assert ledger.is_disowned(theirs.step)
    assert 99 not in {position.offset for position in ledger.positions}
    drifted = [event for event in read(log, STEPS.name) if isinstance(event, RedoDrifted)]
    assert [(theirs.step, theirs.weight_hash)] == [(d.step, d.expected_hash) for d in drifted]
    made = [s for s in steps(log) if s.step in ledger.steps and not ledger.is_disowned(s.step)]
    counted = [s for s in made if ledger.steps[s.step].weight_hash == s.weight_hash]
    trained = Counter((ref.group_id, ref.sample) for step in counted for ref in step.samples)
    assert {1} == set(trained.values())


def check_weights(log: MemoryLog) -> None:
    """Each announced version that is still served can be pulled, and is the ledger's."""
    hashes = {step.policy_version: step.weight_hash for step in steps(log)}
    events = [e for e in read(log, POLICY_VERSIONS.name) if isinstance(e, PolicyPublished)]
    channel = FileWeightChannel()
    assert [1, 2, 3] == sorted(hashes)
    for event in events:
        assert hashes.get(event.policy_version, event.weight_hash) == event.weight_hash
        assert dict(channel.pull(event, WAIT_S))


def test_a_trainer_ends_behind_a_claim_that_nobody_living_made(tmp_path: Path) -> None:
    """It fences nobody, and voids what is written behind it; the next start claims the run again.
    A claim of another epoch than the next counts for nobody."""
    log, config = make_log(), make_config(tmp_path, trainer__max_staleness=3)
    trainer = make_trainer(log, config)
    tick_until(trainer, lambda: trainer._reporter.policy_version == 0)
    forger = MemoryBus(log, "demo").producer("forger")
    forger.commit([outgoing(STEPS, trainer_started(run="demo", epoch=2**62, instance="forged"))])
    trainer.tick()
    forger.commit([outgoing(STEPS, trainer_started(run="demo", epoch=2, instance="forged"))])
    with pytest.raises(FencedError, match="a claim of epoch 2"):
        trainer.tick()
    trainer.close()
    send(log, *(scored(group, sample, 0) for group in range(3) for sample in range(2)))
    finish(log, config)
    assert {3} == {step.epoch for step in steps(log)}
    assert 3 == len(steps(log))
