"""Which records are meant: by topic, time, offset, group, row, step or version. Pure.

The same words choose what is recorded and what is replayed. A record that has no such property (a
heartbeat has no group) is left out where one is asked for; claims (`TrainerStarted`) and the topic
`schemas` stay in any case, for nothing can be understood without them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Set
from dataclasses import dataclass, field

from rlstreams.schemas.events import (
    Event,
    GroupsDropped,
    PolicyPublished,
    StepCompleted,
    TrainerStarted,
)
from rlstreams.streams.log.record import Partition, RawRecord
from rlstreams.streams.log.topics import SCHEMAS
from rlstreams.streams.recording.facts import Facts, facts_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """Numbers from `first` to `last`, both included."""

    first: float = -math.inf
    last: float = math.inf

    def __contains__(self, number: float) -> bool:
        return self.first <= number <= self.last

    def overlaps(self, low: float, high: float) -> bool:
        """Whether any number of low to high is in it."""
        return self.first <= high and low <= self.last


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """What was asked for. Of topics, times and offsets every field that is given must hold.

    A record about a sample (it has a group) must be in `groups`, `samples`, `rows` and `versions`;
    any other one in `steps`, else in `versions`, else it must name one of the groups. So
    `steps` alone means nothing for samples: whoever asks for steps also gives their groups.
    """

    topics: frozenset[str] = frozenset()
    time_ms: Range | None = None
    offsets: Mapping[Partition, Range] = field(default_factory=dict)  # other partitions: nothing
    steps: Range | None = None
    versions: Range | None = None
    rows: frozenset[int] | None = None
    groups: frozenset[str] | None = None
    samples: frozenset[tuple[str, int]] | None = None

    def wants_partition(self, partition: Partition) -> bool:
        """Whether anything of it can be meant."""
        if self.topics and partition.topic not in self.topics:
            return False
        return not self.offsets or partition in self.offsets

    def wants(self, raw: RawRecord, event: Event | None) -> bool:
        """Whether this record is meant; `event` is None if it is none."""
        if not self.wants_partition(raw.partition):
            return False
        span = self.offsets.get(raw.partition)
        if span is not None and raw.position.offset not in span:
            return False
        if raw.position.topic == SCHEMAS.name or isinstance(event, TrainerStarted):
            return True
        if self.time_ms is not None and raw.timestamp_ms not in self.time_ms:
            return False
        about = (self.steps, self.versions, self.rows, self.groups, self.samples)
        if all(wish is None for wish in about):
            return True
        facts = facts_of(event)
        return self._wants_other(event, facts) if facts.group_id is None else self._wants(facts)

    def _wants(self, facts: Facts) -> bool:
        if self.versions is not None:
            if facts.version is None:
                return False
            oldest = facts.version if facts.oldest_version is None else facts.oldest_version
            if not self.versions.overlaps(oldest, facts.version):
                return False
        return (
            (self.groups is None or facts.group_id in self.groups)
            and (self.samples is None or (facts.group_id, facts.sample) in self.samples)
            and (self.rows is None or facts.row in self.rows)
        )

    def _wants_other(self, event: Event | None, facts: Facts) -> bool:
        if self.steps is not None:
            if facts.step is None:
                return False
            # A step starts from the version of the step before.
            is_base = isinstance(event, PolicyPublished) and facts.step + 1 in self.steps
            return is_base or facts.step in self.steps
        if self.versions is not None:
            return facts.version is not None and facts.version in self.versions
        if isinstance(event, StepCompleted):
            named = {(ref.group_id, ref.sample) for ref in event.samples}
            return self._wants_any(named)
        if isinstance(event, GroupsDropped):
            return self._wants_any({(group.group_id, -1) for group in event.groups})
        return False

    def _wants_any(self, named: Set[tuple[str, int]]) -> bool:
        in_groups = self.groups is not None and any(g in self.groups for g, _ in named)
        return in_groups or (self.samples is not None and bool(named & self.samples))
