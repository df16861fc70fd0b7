"""A trainer that slept while its successor worked changes nothing when it wakes up."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from schemas.events import PolicyPublished
from streams.crash_points import CrashPoint, arm
from streams.errors import FencedError
from streams.memory.log import MemoryLog
from streams.topics import POLICY_VERSIONS, STEPS
from tests.heavy.trainer.trainer_stand import (
    make_config,
    make_log,
    make_trainer,
    read,
    scored,
    send,
    steps,
    turn_until,
)
from workers.config.run import RunConfig
from workers.loop.runtime import Exit, exit_status
from workers.trainer.checkpoint import CheckpointStore
from workers.trainer.worker import TrainerWorker
from workers.weights.channel import WeightError
from workers.weights.file import FileWeightChannel

WAIT_S = 20.0


class Sleep:
    """As SIGSTOP does: from a crash point on, all threads of the trainer stand still."""

    def __init__(self, trainer: TrainerWorker, point: CrashPoint, count: int) -> None:
        self._compute = trainer._compute_thread
        self._point = point
        self._left = count
        self.driver: threading.Thread | None = None
        self.asleep = threading.Event()
        self.wake = threading.Event()

    def drive(self, trainer: TrainerWorker) -> None:
        """Turn after turn in a thread of its own."""
        self.driver = threading.current_thread()
        turn_until(trainer, lambda: trainer.done)

    def __call__(self, point: CrashPoint) -> None:
        if threading.current_thread() not in {self.driver, *self._compute._threads}:
            return
        self._left -= point == self._point
        if self._left <= 0:
            self.asleep.set()
            assert self.wake.wait(WAIT_S)


@pytest.fixture(autouse=True)
def disarmed() -> Iterator[None]:
    yield
    arm(None)


def finish(log: MemoryLog, config: RunConfig) -> None:
    """A successor takes over and makes all the steps that are left."""
    successor = make_trainer(log, config, "two", takeover=True)
    turn_until(successor, lambda: successor.done)
    successor.close()


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
    assert newest.manifest is not None
    assert (2, 3) == (newest.manifest.epoch, newest.manifest.step)


def check_weights(log: MemoryLog) -> None:
    """Each announced version that is still served can be pulled, and is the ledger's."""
    hashes = {step.policy_version: step.weight_hash for step in steps(log)}
    events = [e for e in read(log, POLICY_VERSIONS.name) if isinstance(e, PolicyPublished)]
    channel = FileWeightChannel()
    assert [1, 2, 3] == sorted(hashes)
    for event in events:
        assert hashes.get(event.policy_version, event.weight_hash) == event.weight_hash
        assert dict(channel.pull(event, WAIT_S))


def test_a_fenced_trainer_ends_with_75() -> None:
    """The supervisor knows what to do about that."""
    assert Exit.FENCED == exit_status(FencedError("fenced"))


def test_bytes_of_a_zombie_are_not_the_announced_version(tmp_path: Path) -> None:
    """Even under the announced name, what has another hash is refused."""
    log, config = make_log(), make_config(tmp_path)
    trainer = make_trainer(log, config)
    turn_until(trainer, lambda: trainer._reporter.policy_version == 0)
    trainer.close()
    (event,) = (e for e in read(log, POLICY_VERSIONS.name) if isinstance(e, PolicyPublished))
    (path,) = (tmp_path / "weights").glob("*.safetensors")
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(WeightError, match="was published with hash"):
        dict(FileWeightChannel().pull(event, WAIT_S))
