"""A run's topics by hand: healthy, until a test breaks something."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from rlstreams.schemas import encode
from rlstreams.schemas.events import (
    ClosedGroups,
    Event,
    PartitionPosition,
    SampleRef,
    StepCompleted,
)
from rlstreams.streams.audit.classes import Classes, Reached
from rlstreams.streams.audit.fold import AuditFold
from rlstreams.streams.audit.report import AuditReport
from rlstreams.streams.log.done_set import encode_done
from rlstreams.streams.log.record import Committed, Partition, Position, RawRecord
from tests.factories import (
    dropped_group,
    groups_dropped,
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

CONFIG = json.dumps({"trainer": {"max_staleness": 1}})
SIZE = 2  # samples of a group


class Log:
    """A run's topics in memory, one partition each; written as the roles would."""

    def __init__(self) -> None:
        self.topics: dict[str, list[Event]] = {
            name: []
            for name in (
                "steps",
                "calls",
                "outcomes",
                "dead-letters",
                "scored-trajectories",
                "trajectories",
                "policy-pulls",
                "policy-versions",
                "prompts",
            )
        }
        self.rollout_done: set[int] = set()
        self.logprob_done: set[int] = set()
        self.expired: dict[Partition, int] = {}
        self.hidden: set[tuple[str, int]] = set()
        # Value and headers in place of an event's, by topic and offset.
        self.damaged: dict[tuple[str, int], tuple[bytes, dict[str, bytes]]] = {}

    def add(self, topic: str, event: Event) -> int:
        self.topics[topic].append(event)
        return len(self.topics[topic]) - 1

    def issue(self, group_id: str, **changes: Any) -> list[int]:
        return [
            self.add(
                "prompts",
                prompt(group_id=group_id, sample=sample, group_size=SIZE, **changes),
            )
            for sample in range(SIZE)
        ]

    def roll_out(self, group_id: str, version: int = 0, **changes: Any) -> list[int]:
        """Issued, and answered under `version`."""
        self.rollout_done.update(self.issue(group_id, **_only(changes, "purpose")))
        changes.setdefault("segments", (prompt_segment(), policy_segment(version=version)))
        return [
            self.add(
                "trajectories",
                trajectory(group_id=group_id, sample=sample, **changes),
            )
            for sample in range(SIZE)
        ]

    def score(self, group_id: str, version: int = 0, **changes: Any) -> list[SampleRef]:
        """Issued, answered and scored; gives what a step would say of the samples."""
        offsets = self.roll_out(group_id, version, **changes)
        self.logprob_done.update(offsets)
        refs = []
        for sample, offset in enumerate(offsets):
            event = self.topics["trajectories"][offset]
            at = self.add("scored-trajectories", scored(event, trajectory_offset=offset))
            ref = sample_ref(group_id, sample, offset=at, oldest_policy_version=version)
            refs.append(ref)
        return refs

    def step(self, step: int, refs: list[SampleRef], closed: int, **changes: Any) -> None:
        """A step of these samples; `closed` groups are closed after it."""
        values: dict[str, Any] = {
            "samples": tuple(refs),
            "closed": ClosedGroups(watermark=closed),
            "masked": (),
            "absent": (),
            "positions": (PartitionPosition(topic="scored-trajectories", partition=0, offset=0),),
        }
        self.add("steps", step_completed(step, **{**values, **changes}))

    def publish(self, version: int, **changes: Any) -> None:
        """Announced by the trainer, loaded by the rollout worker."""
        self.add("policy-versions", policy_published(version, **changes))
        self.add("policy-pulls", policy_loaded(version))

    def records(self, topic: str) -> list[RawRecord]:
        found = []
        for offset, event in enumerate(self.topics[topic]):
            raw = raw_record(topic, offset, event)
            if damaged := self.damaged.get((topic, offset)):
                raw = raw._replace(value=damaged[0], headers=damaged[1])
            if (topic, offset) not in self.hidden:
                found.append(raw)
        return found

    def report(self, *, steps_last: bool = False) -> AuditReport:
        fold = AuditFold(self.expired)
        topics = list(self.topics)
        for topic in topics[1:] + topics[:1] if steps_last else topics:
            feed(fold, self.records(topic))
        return Classes(fold, reached(self.rollout_done, self.logprob_done)).report()


def raw_record(topic: str, offset: int, event: Event) -> RawRecord:
    return RawRecord(
        position=Position(topic, 0, offset),
        offsets=(offset,),
        key=b"",
        value=b"".join(encode(event)),
    )


def feed(fold: AuditFold, records: list[RawRecord]) -> None:
    """As the audit does: what a trainer says of events in its name is known before they count."""
    ahead = []
    for raw in records:
        if raw.position.topic != "steps":
            fold.take(raw)
        elif (step := fold.foresee(raw)) is not None:
            ahead.append((step, raw.position))
    for step, position in ahead:
        fold.train(step, position)


def reached(rollout_done: set[int], logprob_done: set[int]) -> Reached:
    """Groups that are done with these offsets of partition 0."""

    def at(topic: str, done: set[int]) -> dict[Partition, Committed]:
        return {Partition(topic, 0): Committed(offset=0, metadata=encode_done(0, done))}

    return Reached(at("prompts", rollout_done), at("trajectories", logprob_done))


def _only(values: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name in names}


def healthy() -> Log:
    """Groups 0 and 1 trained, 2 dropped, 3 to 5 in flight at three roles, one evaluation."""
    log = Log()
    log.add("steps", trainer_started(config=CONFIG))
    for version in range(3):
        log.publish(version)
    log.step(1, log.score("0"), closed=1)
    log.step(2, log.score("1"), closed=2)
    log.score("2")
    dropped = groups_dropped(groups=(dropped_group("2"),), closed=ClosedGroups(watermark=3))
    log.add("steps", dropped)
    log.score("3")
    log.roll_out("4")
    log.issue("5")
    log.logprob_done.update(log.roll_out("e0-7", purpose="evaluate"))
    return log


def kinds(report: AuditReport) -> dict[str, int]:
    return dict(report.breach_counts)


def change_step(log: Log, step: int, **changes: Any) -> None:
    steps = log.topics["steps"]
    for index, event in enumerate(steps):
        if isinstance(event, StepCompleted) and event.step == step:
            steps[index] = replace(event, **changes)


def step_of(log: Log, step: int) -> StepCompleted:
    steps = (e for e in log.topics["steps"] if isinstance(e, StepCompleted))
    return next(event for event in steps if event.step == step)
