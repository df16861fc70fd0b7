"""The trainer on the in-memory log: steps, redo, drops, zombies."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest

from rlstreams.schemas.events import (
    PolicyPublished,
    StepsRedone,
    TrainerHeartbeat,
    WorkerReport,
)
from rlstreams.streams.log.codec import outgoing
from rlstreams.streams.log.record import Outgoing
from rlstreams.streams.log.topics import (
    CONTROL,
    DEAD_LETTERS,
    POLICY_VERSIONS,
    SCORED,
    STEPS,
    WORKER_EVENTS,
)
from rlstreams.workers.loop.control import ControlFollower, ControlledRole
from rlstreams.workers.trainer.training.checkpoint import CheckpointStore
from rlstreams.workers.trainer.worker import TrainerWorker
from rlstreams.workers.weights.layout import weight_hash
from tests import factories
from tests.heavy.trainer.trainer_stand import (
    make_config,
    make_log,
    make_trainer,
    read,
    scored,
    send,
    steps,
    tick_until,
    train,
)
from tests.memory.bus import MemoryBus
from tests.memory.log import MemoryLog
from tests.unit.roles.stand import DEADLINE_S


def test_each_step_is_committed_before_its_version_is_published(tmp_path: Path) -> None:
    """Three groups make three steps; the ledger holds all that redo needs."""
    log, config = make_log(), make_config(tmp_path)
    trainer = make_trainer(log, config)
    train(log, trainer, 3)
    tick_until(trainer, lambda: trainer.done)
    trainer.close()
    done = steps(log)
    assert [s.step for s in done] == [1, 2, 3]
    assert [[(r.group_id, r.sample) for r in s.samples] for s in done] == [
        [(str(group), 0), (str(group), 1)] for group in range(3)
    ]
    assert [s.staleness for s in done] == [{"0": 10}] * 3
    assert done[1].previous_hash == done[0].weight_hash != done[1].weight_hash
    assert done[-1].closed.watermark == 3
    published = [e for e in read(log, POLICY_VERSIONS.name) if isinstance(e, PolicyPublished)]
    assert [(p.policy_version, p.weight_hash) for p in published[1:]] == [
        (s.policy_version, s.weight_hash) for s in done
    ]


def test_a_paused_trainer_begins_no_step(tmp_path: Path) -> None:
    """A whole batch lies before it; told to go on, it makes the step."""
    log = make_log()
    trainer = make_trainer(log, make_config(tmp_path))
    role = ControlledRole(trainer, trainer, ControlFollower(MemoryBus(log, "demo"), every_s=0.0))
    tell = MemoryBus(log, "demo").producer("up").commit
    tell([outgoing(CONTROL, factories.control_state(state="paused"))])
    role.tick()
    send(log, *(scored(0, sample, 0) for sample in range(2)))
    tick_until(role, lambda: trainer._writer.state == "waiting")
    for _ in range(30):
        role.tick()
        assert trainer._writer.state == "waiting"
    assert (steps(log), trainer._training.learner.num_micro_batches) == ([], 0)
    tell([outgoing(CONTROL, factories.control_state(state="running"))])
    tick_until(role, lambda: len(steps(log)) == 1)
    role.close()


def test_a_drain_leaves_a_checkpoint_that_the_next_one_starts_from(tmp_path: Path) -> None:
    """After a clean stop nothing is redone, and no lease is waited for."""
    log, config = make_log(), make_config(tmp_path, deadlines__lease_s=60.0)
    first = make_trainer(log, config)
    train(log, first, 1)
    first.drain()
    tick_until(first, lambda: first.done)
    first.close()
    second = make_trainer(log, config, instance="two")
    tick_until(second, lambda: second._reporter.policy_version == 1)
    assert second._recovery.saved_step == 1
    assert not [event for event in read(log, STEPS.name) if isinstance(event, StepsRedone)]
    second.close()


class SlowDisk(CheckpointStore):
    """A checkpoint takes as long as the test wants, and ends as it wants."""

    def __init__(self, trainer: TrainerWorker, folder: Path) -> None:
        super().__init__(folder / "checkpoints")
        self.is_saving, self.may_end = threading.Event(), threading.Event()
        self.error: OSError | None = None
        trainer._recovery._store = self

    def save(self, *args: Any) -> Any:
        self.is_saving.set()
        assert self.may_end.wait(DEADLINE_S)
        if self.error:
            raise self.error
        return super().save(*args)


def told(log: MemoryLog) -> tuple[str, str, str]:
    """State and detail of the newest report, and the newest heartbeat's state."""
    report = [e for e in read(log, WORKER_EVENTS.name) if isinstance(e, WorkerReport)][-1]
    beat = [e for e in read(log, STEPS.name) if isinstance(e, TrainerHeartbeat)][-1]
    return report.state, report.detail, beat.state


@pytest.mark.parametrize("is_drain", [True, False])
def test_the_last_checkpoint_is_told_as_any_other(tmp_path: Path, is_drain: bool) -> None:
    """Of a drain or of a run's end: it may take as long, and no state else has that allowance."""
    log, config = make_log(), make_config(tmp_path, trainer__steps=2 if is_drain else 1)
    trainer = make_trainer(log, config)
    disk = SlowDisk(trainer, tmp_path)
    train(log, trainer, 1)
    if is_drain:
        trainer.drain()
    tick_until(trainer, disk.is_saving.is_set)
    trainer.tick()
    assert told(log) == ("saving", "a checkpoint of step 1", "saving")
    disk.may_end.set()
    tick_until(trainer, lambda: trainer.done)
    trainer.close()
    last = [e for e in read(log, WORKER_EVENTS.name) if isinstance(e, WorkerReport)][-1]
    assert ("stopped", 1.0) == (last.state, last.counters["checkpoints"])


def test_steps_go_on_while_a_checkpoint_is_written(tmp_path: Path) -> None:
    """It holds what was there when it was begun; the next one waits for it; a drain begins no step,
    and leaves one of the newest step."""
    every, stale = {"trainer__checkpoint_every": 1}, {"trainer__max_staleness": 9}
    log, config = make_log(), make_config(tmp_path, **every, **stale)
    trainer = make_trainer(log, config)
    disk = SlowDisk(trainer, tmp_path)
    train(log, trainer, 1)
    tick_until(trainer, disk.is_saving.is_set)
    train(log, trainer, 2)
    tick_until(trainer, lambda: told(log)[0] == "saving")
    send(log, *(scored(7, sample, 0) for sample in range(2)))
    trainer.drain()
    for _ in range(5):
        trainer.tick()
    assert (list(disk.manifests()), trainer.done) == ([], False)
    disk.may_end.set()
    tick_until(trainer, lambda: trainer.done)
    trainer.close()
    newest, first = disk.manifests()
    done = steps(log)
    assert [s.step for s in done] == [first.step, newest.step] == [1, 2]
    for manifest, step in ((first, done[0]), (newest, done[1])):
        assert weight_hash(disk.load_weights(manifest)) == manifest.weight_hash == step.weight_hash


def test_a_checkpoint_that_cannot_be_written_ends_the_trainer(tmp_path: Path) -> None:
    """At the next tick, though it waits for samples: nothing else would say it until a restart."""
    log, config = make_log(), make_config(tmp_path, trainer__checkpoint_every=1)
    trainer = make_trainer(log, config)
    disk = SlowDisk(trainer, tmp_path)
    disk.error = OSError(28, "No space left on device")
    train(log, trainer, 1)
    tick_until(trainer, disk.is_saving.is_set)
    tick_until(trainer, lambda: told(log)[0] == "waiting")
    disk.may_end.set()
    with pytest.raises(OSError, match="No space left"):
        tick_until(trainer, lambda: trainer.done)
    trainer.close()


def test_no_step_passes_a_record_whose_letter_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A restart goes on behind it: if we died now, nothing would say that it was there."""
    log, config = make_log(), make_config(tmp_path)
    trainer = make_trainer(log, config)
    tick_until(trainer, lambda: bool(read(log, POLICY_VERSIONS.name)))
    monkeypatch.setattr(trainer._samples, "_next_drop", time.monotonic() + 3600)
    send(log, Outgoing(topic=SCORED.name, key=b"x", value=[b"rubbish"]))
    train(log, trainer, 1)
    trainer.close()
    assert [letter.value for letter in read(log, DEAD_LETTERS.name)] == [b"rubbish"]
