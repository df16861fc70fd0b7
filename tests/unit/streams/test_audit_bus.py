"""The audit reads a run through the port `Bus`, also while transactions are open."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence

import pytest

from schemas.events import ClosedGroups, Event, PartitionPosition
from streams.audit import audit
from streams.bus import Bus, GroupConsumer
from streams.codec import outgoing
from streams.errors import TopicMismatchError
from streams.memory import MemoryBus
from streams.memory_log import MemoryLog, State
from streams.parts import Message
from streams.record import Committed, Outgoing, Partition, Position
from streams.topic import Topic
from streams.topics import POLICY_PULLS, PROMPTS, SCORED, STEPS, TOPICS, TRAJECTORIES
from tests.factories import (
    policy_loaded,
    policy_segment,
    prompt,
    prompt_segment,
    sample_ref,
    scored,
    step_completed,
    trainer_started,
    trajectory,
)

NUM_GROUPS, SIZE = 3, 2
CONFIG = json.dumps({"trainer": {"max_staleness": 1}})


class Run:
    """A small run on a `MemoryLog`, its roles played by the test."""

    def __init__(self) -> None:
        self.log = MemoryLog()
        for topic in TOPICS:
            self.log.create(f"run.{topic.name}", 1 if topic.single_partition else 2)
        self.bus: Bus = MemoryBus(self.log, "run")
        self._pen = self.bus.producer("pen")
        self._rollout = self.bus.consumer("rollout", [PROMPTS.name])
        self._logprob = self.bus.consumer("logprob", [TRAJECTORIES.name])

    def write(self, topic: Topic, *events: Event) -> Sequence[Position]:
        return self._pen.commit([outgoing(topic, event) for event in events])

    def issue(self) -> None:
        for group in range(NUM_GROUPS):
            samples = (
                prompt(group_id=str(group), sample=sample, group_size=SIZE)
                for sample in range(SIZE)
            )
            self.write(PROMPTS, *samples)

    def roll_out(self, *, forget: str = "") -> None:
        """Answer all prompts but those of group `forget`; commit past all of them."""
        self.write(POLICY_PULLS, policy_loaded(0))
        segments = (prompt_segment(), policy_segment(version=0))
        answers = [
            outgoing(
                TRAJECTORIES, trajectory(group_id=str(group), sample=sample, segments=segments)
            )
            for group in range(NUM_GROUPS)
            for sample in range(SIZE)
            if str(group) != forget
        ]
        self._commit(self._rollout, answers)

    def score(self) -> Sequence[Position]:
        segments = (prompt_segment(), policy_segment(version=0))
        events = [
            outgoing(
                SCORED,
                scored(trajectory(group_id=str(group), sample=sample, segments=segments)),
            )
            for group in range(NUM_GROUPS)
            for sample in range(SIZE)
        ]
        return self._commit(self._logprob, events)

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
        self.write(STEPS, trainer_started(config=CONFIG), step)

    def _commit(self, consumer: GroupConsumer, records: Sequence[Outgoing]) -> Sequence[Position]:
        while consumer.poll(100, 0.0).records:
            pass
        done = {p: Committed(offset=at) for p, at in consumer.positions().items()}
        return self._pen.commit(records, done, consumer)


def test_a_run_is_audited_through_the_bus() -> None:
    """Markers between records, two partitions, one group trained, two in flight."""
    run = Run()
    run.issue()
    run.roll_out()
    run.train(0, run.score())
    report = audit(run.bus, settle_s=0)
    assert report.breach_counts == {}
    assert (report.issued, report.trained) == (NUM_GROUPS * SIZE, SIZE)
    assert report.in_flight == {"trainer": (NUM_GROUPS - 1) * SIZE}
    assert report.staleness == {0: 3 * SIZE}


def test_a_run_that_nobody_worked_on_is_in_flight() -> None:
    """No group has committed anything."""
    run = Run()
    run.issue()
    assert audit(run.bus, settle_s=0).in_flight == {"rollout": NUM_GROUPS * SIZE}


def test_what_a_worker_forgot_is_lost() -> None:
    """It committed past the prompts of a group and wrote nothing."""
    run = Run()
    run.issue()
    run.roll_out(forget="1")
    report = audit(run.bus, settle_s=0)
    assert report.breach_counts == {"lost": SIZE}
    assert {breach.id for breach in report.breaches} == {"1/0", "1/1"}


def test_a_record_behind_an_open_transaction_is_waited_for() -> None:
    """Committed, but hidden from every reader until the older transaction is over."""
    run = Run()
    run.issue()
    epoch = run.log.initialise("slow")
    slow = run.log.begin("slow", epoch)
    for number in range(2):
        partition = Partition("run.trajectories", number)
        message = Message(
            partition=partition, offset=-1, key=b"", value=b"", headers={}, timestamp_ms=0
        )
        run.log.append(slow, message)
    run.roll_out()
    assert audit(run.bus, settle_s=0).lost == NUM_GROUPS * SIZE
    timer = threading.Timer(0.3, run.log.end, (slow, State.ABORTED))
    timer.start()
    report = audit(run.bus, settle_s=10)
    timer.join()
    assert report.breach_counts == {}
    assert report.in_flight == {"logprob": NUM_GROUPS * SIZE}


def test_a_run_without_topics_is_refused() -> None:
    """Another run id, or a broker that knows nothing of it."""
    with pytest.raises(TopicMismatchError):
        audit(MemoryBus(MemoryLog(), "nobody"), settle_s=0)
