"""Rollout and log-prob workers that die at a crash point, and whose group drops them then."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from rlstreams.schemas.events import DeadLetter, ScoredTrajectory, Trajectory
from rlstreams.streams.log import crash_points
from rlstreams.streams.log.codec import outgoing
from rlstreams.streams.log.crash_points import CrashPoint
from rlstreams.streams.log.record import Committed, Partition
from rlstreams.streams.log.topics import DEAD_LETTERS, PROMPTS, SCORED, TRAJECTORIES
from rlstreams.workers.logprob.worker import make_worker as make_logprob
from rlstreams.workers.loop.stage import StageLoop
from rlstreams.workers.rollout.worker import make_worker as make_rollout
from rlstreams.workers.weights.file import FileWeightChannel
from tests.fake_engine import FakeEngine, FakeScorer
from tests.memory.bus import MemoryBus
from tests.memory.consumer import MemoryGroupConsumer
from tests.unit.roles.stand import Stand, make_sampler, tick_until
from tests.unit.roles.test_logprob import segment, trajectory

INPUTS = {"rollout": PROMPTS.name, "logprob": TRAJECTORIES.name}


class Killed(BaseException):
    """What a SIGKILL is to a process, in a process of many."""


def kill_at(point: CrashPoint, count: int) -> Callable[[CrashPoint], None]:
    """A hook that kills at the `count`-th time that `point` is reached."""
    left = count

    def hook(reached: CrashPoint) -> None:
        nonlocal left
        left -= reached == point
        if left == 0 and reached == point:
            raise Killed

    return hook


class MortalBus(MemoryBus):
    """Remembers its consumers, so that the group can drop them."""

    def __init__(self, stand: Stand) -> None:
        super().__init__(stand.log, "demo")
        self._consumers: list[MemoryGroupConsumer] = []

    def consumer(self, group: str, topics: Sequence[str]) -> MemoryGroupConsumer:
        self._consumers.append(super().consumer(group, topics))
        return self._consumers[-1]

    def expire(self) -> None:
        """Their sessions end."""
        for consumer in self._consumers:
            consumer.expel()


class Site:
    """Some samples for one role on an in-memory log, and its workers, one after the other.

    Args:
        odd: the sample whose answer holds token 13, and is long.
    """

    def __init__(
        self, folder: Path, role: str, *, num_samples: int = 12, odd: int | None = None
    ) -> None:
        self.stand = Stand(folder, rollout__slots=4, rollout__commit_interval_s=0.001)
        self.stand.publish(0)
        self.role = role
        self.samples = {("0", sample) for sample in range(num_samples)}
        if role == "rollout":
            self.stand.issue("0", num_samples)
        else:
            events = [
                trajectory(
                    "0",
                    segment(0, 5, *([13] * 20 if sample == odd else [6])),
                    sample=sample,
                    group_size=num_samples,
                )
                for sample in range(num_samples)
            ]
            self.stand.send(*(outgoing(TRAJECTORIES, event) for event in events))
        self.ends = self.stand.bus().ends(INPUTS[role])

    def live(
        self, hook: Callable[[CrashPoint], None] | None = None, scorer: FakeScorer | None = None
    ) -> bool:
        """A worker from start to death; False if it lived until all was done, and left cleanly."""
        bus = MortalBus(self.stand)
        worker = self._make(bus, scorer)
        crash_points.arm(hook)
        try:
            tick_until(worker, self.is_covered)
            worker.drain()
            tick_until(worker, lambda: worker.done)
        except Killed:
            bus.expire()
            worker._stage.close()  # threads only, which a dead process has none of
            return True
        finally:
            crash_points.arm(None)
        worker.close()
        return False

    def _make(self, bus: MemoryBus, scorer: FakeScorer | None) -> StageLoop:
        context = self.stand.context(self.role)
        if self.role == "rollout":
            engine = FakeEngine(slots=4)
            sampler = make_sampler(self.stand, engine, max_new_tokens=2)
            return make_rollout(context, bus, engine, FileWeightChannel(), sampler)
        return make_logprob(context, bus, scorer or FakeScorer(), FileWeightChannel())

    def is_covered(self) -> bool:
        """Whether the group's positions cover all input."""
        committed = self.committed()
        return all(
            at is not None and at.offset >= self.ends[partition]
            for partition in self.ends
            if (at := committed.get(partition)) is not None or self.ends[partition]
        )

    def committed(self) -> Mapping[Partition, Committed]:
        """The group's positions; an open transaction of a dead worker does not count yet."""
        with self.stand.log.changed:
            found = self.stand.log.group(f"demo.{self.role}").committed
            return {Partition(INPUTS[self.role], p.number): at for p, at in found.items()}

    def outcomes(self) -> Counter[tuple[str, int]]:
        """How often each sample came to an end, read committed."""
        ends = Counter((d.group_id, d.sample) for d in self.letters())
        if self.role == "rollout":
            found = self.stand.read(TRAJECTORIES.name, Trajectory)
        else:
            found = [s.trajectory for s in self.stand.read(SCORED.name, ScoredTrajectory)]
        return ends + Counter((t.group_id, t.sample) for t in found)

    def letters(self) -> list[DeadLetter]:
        """All dead letters."""
        return self.stand.read(DEAD_LETTERS.name, DeadLetter)
