"""Logs as a run may leave them, by a random generator: copies, dead letters, drops, re-claims, void
steps, evaluations, several partitions. And what became of each sample, by reading it off the whole.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from rlstreams.schemas import encode
from rlstreams.schemas.events import (
    AbsentSample,
    ClosedGroups,
    DeadLetter,
    Event,
    GroupsDropped,
    Prompt,
    SampleRef,
    ScoredTrajectory,
    StepCompleted,
    TrainerStarted,
    Trajectory,
)
from rlstreams.streams.log.record import Partition, Position, RawRecord
from tests.factories import (
    NOW_MS,
    dead_letter,
    dropped_group,
    groups_dropped,
    prompt,
    sample_ref,
    scored,
    step_completed,
    trainer_started,
    trajectory,
)

SIZE = 3  # samples of a training group
PARTITIONS = 2
Name = tuple[str, int]


@dataclass
class RandomLog:
    """A log under construction: events by partition, their index is their offset."""

    rng: random.Random
    partitions: dict[Partition, list[Event]] = field(default_factory=lambda: defaultdict(list))
    epoch: int = 1
    step: int = 0
    closed: set[int] = field(default_factory=set)

    def add(self, topic: str, event: Event, group_id: str = "") -> Position:
        number = sum(map(ord, group_id)) % PARTITIONS if group_id else 0
        found = self.partitions[Partition(topic, number)]
        found.append(event)
        return Position(topic, number, len(found) - 1)

    def sample(self, group_id: str, number: int, size: int) -> None:
        """A sample as far as it comes, its copies among it; and perhaps dead letters."""
        purpose = "evaluate" if group_id.startswith("e") else "train"
        own = {"group_id": group_id, "sample": number, "group_size": size, "purpose": purpose}
        places, stages = [], self.rng.choice([0, 1, 2, 2, 2])
        for _ in range(1 + (self.rng.random() < 0.2)):
            reward = self.rng.choice([0.0, 0.25, 1.0])
            places.append(self.add("prompts", prompt(**own), group_id))
            done = trajectory(**own, reward=reward, finished_at_ms=NOW_MS + self.rng.randrange(99))
            for _ in range((stages > 0) * self.rng.choice([1, 1, 1, 2])):
                places.append(self.add("trajectories", done, group_id))
            if stages > 1 and purpose == "train":
                places.append(self.add("scored-trajectories", scored(done), group_id))
        for _ in range(self.rng.choice([0, 0, 0, 0, 1, 2])):
            about = self.rng.choice(places)
            origin = {
                "origin_topic": about.topic, "origin_partition": about.partition,
                "origin_offset": about.offset, "role": self.rng.choice(["rollout", "trainer"]),
            }  # fmt: skip
            whose = own if self.rng.random() < 0.6 else {"group_id": "", "sample": -1}
            whose = {name: whose[name] for name in ("group_id", "sample")} | {"purpose": purpose}
            self.add("dead-letters", dead_letter(**origin, **whose), group_id)

    def close(self, number: int) -> None:
        """A step of the group, with all or some of its samples, or a drop."""
        name, is_void = str(number), self.rng.random() < 0.2
        closed = self.closed | {number}
        facts = {
            "epoch": self.epoch - is_void,
            "closed": ClosedGroups(watermark=0, above=tuple(sorted(closed))),
        }
        if self.rng.random() < 0.4:
            groups = (dropped_group(name, reason=self.rng.choice(["stale", "dead_samples"])),)
            self.add("steps", groups_dropped(groups=groups, **facts))
        else:
            there = [n for n in range(SIZE) if self.rng.random() < 0.7] or [0]
            samples = tuple(sample_ref(name, n, offset=9 * number + n) for n in there)
            absent = tuple(
                AbsentSample(group_id=name, sample=n, reason="reward")
                for n in range(SIZE)
                if n not in there
            )
            again = self.rng.random() < 0.2 and self.step > 0 and not is_void
            step = step_completed(
                self.step + (not again), samples=samples, absent=absent, masked=(), **facts
            )
            self.add("steps", step)
            if is_void or again:
                return
            self.step += 1
        if not is_void:
            self.closed = closed

    def interleaved(self) -> list[tuple[Position, Event]]:
        """All records, each partition in its order, in some order between them."""
        left = {at: list(events) for at, events in self.partitions.items()}
        at = [partition for partition, events in left.items() for _ in events]
        self.rng.shuffle(at)
        taken: dict[Partition, int] = defaultdict(int)
        found = []
        for partition in at:
            offset = taken[partition]
            taken[partition] += 1
            found.append((Position(*partition, offset), left[partition][offset]))
        return found

    def raw(self, topic: str) -> list[RawRecord]:
        """A topic as the audit reads it."""
        return [
            RawRecord(Position(*at, n), (n,), b"", b"".join(encode(event)))
            for at, events in sorted(self.partitions.items())
            if at.topic == topic
            for n, event in enumerate(events)
        ]


def random_log(seed: int) -> RandomLog:
    """A run of a few groups and evaluations."""
    rng = random.Random(seed)
    log = RandomLog(rng)
    log.add("steps", trainer_started(epoch=1))
    groups = rng.randrange(1, 6)
    names = [(str(n), i, SIZE) for n in range(groups) for i in range(SIZE)]
    each = rng.choice([1, 2])
    names += [(f"e{v}-{r}", i, each) for v in range(2) for r in range(2) for i in range(each)]
    for name in names:
        log.sample(*name)
    for number in range(groups):
        if rng.random() < 0.7:
            log.close(number)
        if rng.random() < 0.3:
            log.epoch += 1
            log.add("steps", trainer_started(epoch=log.epoch, next_step=log.step + 1))
    for events in log.partitions.values():
        if isinstance(events[0], DeadLetter):
            rng.shuffle(events)
    return log


class Replay:
    """What became of each sample: every question is answered by looking through the whole log."""

    def __init__(self, log: RandomLog) -> None:
        self.log = log
        self.prompts = self._firsts("prompts")
        self.trajectories = self._firsts("trajectories")
        self.scores = self._firsts("scored-trajectories")
        self.trained: dict[Name, tuple[StepCompleted, SampleRef]] = {}
        self.absent: dict[Name, str] = {}
        self.dropped: dict[str, str] = {}
        self.stepped: set[str] = set()
        self._steps()
        self.dead = self._dead()

    def _firsts(self, topic: str) -> Mapping[Name, tuple[Position, Event]]:
        found: dict[Name, tuple[Position, Event]] = {}
        for at, events in self.log.partitions.items():
            for offset, event in enumerate(events if at.topic == topic else []):
                about = event.trajectory if isinstance(event, ScoredTrajectory) else event
                assert isinstance(about, Prompt | Trajectory)
                name = about.group_id, about.sample
                found.setdefault(name, (Position(*at, offset), event))
        return found

    def _steps(self) -> None:
        epoch = last = 0
        for event in self.log.partitions[Partition("steps", 0)]:
            if isinstance(event, TrainerStarted):
                epoch = event.epoch
            elif isinstance(event, GroupsDropped) and event.epoch == epoch:
                self.dropped |= {group.group_id: group.reason for group in event.groups}
            elif isinstance(event, StepCompleted) and (event.epoch, event.step) == (
                epoch,
                last + 1,
            ):
                last = event.step
                self.trained |= {(r.group_id, r.sample): (event, r) for r in event.samples}
                self.absent |= {(a.group_id, a.sample): a.reason for a in event.absent}
                self.stepped |= {ref.group_id for ref in event.samples}

    def _dead(self) -> set[Name]:
        firsts = {
            at: name
            for stage in (self.prompts, self.trajectories, self.scores)
            for name, (at, _) in stage.items()
        }
        dead = set()
        for at, events in self.log.partitions.items():
            for event in events if at.topic == "dead-letters" else []:
                assert isinstance(event, DeadLetter)
                origin = event.origin_topic, event.origin_partition, event.origin_offset
                name = firsts.get(Position(*origin))
                dead.add((event.group_id, event.sample) if event.group_id else name)
        return dead - {None}  # type: ignore[return-value]

    def is_closed(self, group_id: str) -> bool:
        return group_id in self.stepped or group_id in self.dropped

    def outcome(self, name: Name) -> str:
        """As `schemas/README.md` has it: the first of these that holds."""
        group, is_held_out = name[0], name[0].startswith("e")
        known = {
            "trained": name in self.trained,
            "dead-lettered": name in self.dead,
            "left out": name in self.absent,
            "dropped": group in self.dropped,
            "evaluated": is_held_out and name in self.trajectories,
            "scored": name in self.scores,
            "rolled out": name in self.trajectories,
        }
        return next((outcome for outcome, holds in known.items() if holds), "issued")
