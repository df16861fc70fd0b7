"""A small run on a `MemoryLog`, for tests of the audit through the port `Bus`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence

from rlstreams.schemas.events import ClosedGroups, Event, PartitionPosition, Trajectory
from rlstreams.streams.log.bus import Bus, GroupConsumer
from rlstreams.streams.log.codec import outgoing
from rlstreams.streams.log.record import ID_HEADER, Outgoing, Position, RawRecord
from rlstreams.streams.log.topics import (
    POLICY_PULLS,
    POLICY_VERSIONS,
    PROMPTS,
    SCORED,
    STEPS,
    TRAJECTORIES,
    Topic,
)
from rlstreams.streams.log.tracker import Tracker
from tests.factories import (
    policy_loaded,
    policy_published,
    policy_segment,
    prompt,
    prompt_segment,
    sample_ref,
    scored,
    step_completed,
    trainer_started,
    trajectory,
)
from tests.logs import made_log
from tests.memory.bus import MemoryBus

NUM_GROUPS, SIZE = 3, 2
CONFIG = json.dumps({"trainer": {"max_staleness": 1}})


class Run:
    """Three groups on a `MemoryLog`, the roles played by the test; positions commit done sets.

    Args:
        claims: its trainer has started and published version 0.
    """

    def __init__(self, *, claims: bool = True) -> None:
        self.log = made_log(partitions=2)
        self.bus: Bus = MemoryBus(self.log, "run")
        self._pen = self.bus.producer("pen")
        self._rollout = self.bus.consumer("rollout", [PROMPTS.name])
        self._logprob = self.bus.consumer("logprob", [TRAJECTORIES.name])
        self._trackers = {id(self._rollout): Tracker(), id(self._logprob): Tracker()}
        self._inputs: dict[int, dict[bytes, RawRecord]] = {}
        if claims:
            self.write(STEPS, trainer_started(config=CONFIG))
            self.publish(0)

    def write(self, topic: Topic, *events: Event) -> Sequence[Position]:
        return self._pen.commit([outgoing(topic, event) for event in events])

    def publish(self, version: int) -> None:
        """Announced, then loaded by the worker."""
        self.write(POLICY_VERSIONS, policy_published(version))
        self.write(POLICY_PULLS, policy_loaded(version))

    def issue(self) -> None:
        for group in range(NUM_GROUPS):
            samples = (
                prompt(group_id=str(group), sample=sample, group_size=SIZE)
                for sample in range(SIZE)
            )
            self.write(PROMPTS, *samples)

    def roll_out(self, *, forget: str = "") -> None:
        """Answer all prompts but those of group `forget`; commit past all of them."""
        self.roll_out_some(range(NUM_GROUPS * SIZE), forget=forget)

    def roll_out_some(self, numbers: Iterable[int], *, forget: str = "") -> None:
        """Answer these samples, counted through the groups, in one transaction."""
        samples = [divmod(number, SIZE) for number in numbers]
        answers = [
            outgoing(TRAJECTORIES, answer(group, sample))
            for group, sample in samples
            if str(group) != forget
        ]
        self._commit(self._rollout, samples, lambda _: answers)

    def score(self) -> Sequence[Position]:
        return self.score_some(range(NUM_GROUPS * SIZE))

    def score_some(self, numbers: Iterable[int]) -> Sequence[Position]:
        samples = [divmod(number, SIZE) for number in numbers]
        return self._commit(self._logprob, samples, lambda raws: [_score(raw) for raw in raws])

    def train(self, group: int, positions: Sequence[Position]) -> None:
        """One step of one group."""
        refs = tuple(
            sample_ref(
                str(group),
                sample,
                partition=at.partition,
                offset=at.offset,
                oldest_policy_version=0,
            )
            for sample, at in enumerate(positions[group * SIZE : (group + 1) * SIZE])
        )
        step = step_completed(
            1,
            samples=refs,
            masked=(),
            absent=(),
            closed=ClosedGroups(watermark=1),
            positions=(PartitionPosition(topic=SCORED.name, partition=0, offset=0),),
        )
        self.write(STEPS, step)

    def _commit(
        self,
        consumer: GroupConsumer,
        samples: Sequence[tuple[int, int]],
        answer_to: Callable[[Sequence[RawRecord]], Sequence[Outgoing]],
    ) -> Sequence[Position]:
        """Outputs and what they finish, as a stage does it."""
        tracker = self._trackers[id(consumer)]
        inputs = self._inputs.setdefault(id(consumer), {})
        while True:
            polled = consumer.poll(100, 0.0)
            for raw in tracker.take(polled, consumer.positions()):
                inputs[raw.headers[ID_HEADER]] = raw
            if not polled.records:
                break
        done = [inputs[f"{group}/{sample}/0".encode()] for group, sample in samples]
        positions = self._pen.commit(answer_to(done), tracker.after(done), consumer)
        tracker.commit(done)
        return positions


def _score(raw: RawRecord) -> Outgoing:
    """The score of a trajectory, which it names."""
    group, sample, _ = map(int, raw.headers[ID_HEADER].split(b"/"))
    at = raw.position
    named = {"trajectory_partition": at.partition, "trajectory_offset": at.offset}
    return outgoing(SCORED, scored(answer(group, sample), **named))


def answer(group: int, sample: int) -> Trajectory:
    segments = (prompt_segment(), policy_segment(version=0))
    return trajectory(group_id=str(group), sample=sample, segments=segments)
