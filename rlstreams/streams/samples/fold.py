"""The life of a sample: the one fold of prompts, trajectories, scores, dead letters and steps.

Every screen and count of samples asks it; only the audit, which checks it, folds for itself. Events
come in the order of each partition, in any order between topics, and the end is the same: no
record's meaning depends on the records read before it.

- A sample's first record in each topic counts (`log.fencing`), and of `steps` the events that count
  in the ledger. A copy changes nothing.
- A sample's outcome: trained outweighs dead, dead outweighs left out and dropped
  (`schemas/README.md`, "Where a sample is").
"""

from __future__ import annotations

import math
import sys
from collections import Counter, deque
from collections.abc import Callable, Container, Iterable, Iterator
from typing import Any

from rlstreams.schemas.events import (
    TRAIN,
    AbsentSample,
    DeadLetter,
    Event,
    GroupsDropped,
    Prompt,
    ReplacementRequested,
    SampleRef,
    ScoredTrajectory,
    StepCompleted,
    TensorError,
    Trajectory,
)
from rlstreams.streams.ledger import NOWHERE, Ledger
from rlstreams.streams.log.fencing import FirstRecords
from rlstreams.streams.log.group_ids import evaluation_id, issue_number
from rlstreams.streams.log.record import NO_PLACE, Position, place_of
from rlstreams.streams.log.topics import PROMPTS, SCORED, TRAJECTORIES, Topic
from rlstreams.streams.samples.life import EndedCount, EvalCounts, Group, Letters, Outcome, Sample
from rlstreams.streams.samples.spent import Spent
from rlstreams.streams.tokens import mismatch

OPEN, ALL = 0, sys.maxsize  # samples to keep: those of open groups, or all
MAX_SAMPLES = 1 << 16  # of one group; a larger number is a foreign record
TRUNCATED = "length"  # a finish reason
_EARLY = ("rollout", "logprob")  # a sample that dies there never reaches the trainer


class Samples:
    """All samples of a run. `apply` takes every event; the attributes are the state by now.

    Args:
        ledger: ledger shared with other folds, fed by `apply`; None: one of its own.
        keeps: number of newest samples to keep; `OPEN`: samples of open training groups, and
            held-out ones that are not answered yet.
        wants: groups to fold; None: all.
        group_size: size of training groups, where prompts are not read.
    """

    def __init__(
        self,
        ledger: Ledger | None = None,
        *,
        keeps: int = OPEN,
        wants: Container[str] | None = None,
        group_size: int = 0,
    ) -> None:
        self.ledger = ledger or Ledger(begins_anywhere=True, keeps_steps=True)
        self.ledger.listen(on_step=self._step, on_drop=self._drop)
        self._keeps, self._wants = keeps, wants
        self._first = {topic.name: FirstRecords() for topic in (PROMPTS, TRAJECTORIES, SCORED)}
        self._takes: dict[type[Event], Callable[[Any, Position | None], bool]] = {
            Prompt: self._prompt,
            Trajectory: self._trajectory,
            ScoredTrajectory: self._scored,
            DeadLetter: self._letter,
            ReplacementRequested: self._asked,
        }
        self._on_end: list[Callable[[EndedCount], None]] = []
        # Dead letters that name no sample, by topic and place of the record that they are about;
        # and those of these places whose sample was not looked for yet.
        self._nameless: dict[tuple[str, int], DeadLetter] = {}
        self._unmatched: set[tuple[str, int]] = set()
        # By id: open training groups and, with `OPEN`, evaluations with open samples.
        self._open: dict[str, Group] = {}
        self._holders: deque[Group] = deque()  # groups with kept samples, the oldest first
        self._num_kept = 0
        self.num_forgotten = 0  # samples that were kept and dropped
        self.groups: dict[str, Group] = {}  # in the order in which they were met
        self.group_size = group_size  # of the newest training prompt
        self.last_group = -1  # highest number that was issued
        self.counts: Counter[str] = Counter()  # samples: issued, rolled_out, dead_at_{role}, ...
        self.evaluations: dict[int, EvalCounts] = {}  # by policy version
        self.letters: dict[str, Letters] = {}  # by reason
        self.spent = Spent()
        self.known: Counter[int] = Counter()  # by step: its samples whose trajectory was read
        self.truncated: Counter[int] = Counter()  # by step: those of these that were cut off

    def listen(self, on_end: Callable[[EndedCount], None]) -> None:
        """Call `on_end` with the endings of training samples, each once."""
        self._on_end.append(on_end)

    def apply(self, event: Event, position: Position | None = None) -> bool:
        """Take one event, and its record's position if known.

        Returns:
            False: it changes nothing: a copy, a void event, or one about no sample.
        """
        take = self._takes.get(type(event), self._take_step)
        return take(event, position)

    def _take_step(self, event: Event, position: Position | None) -> bool:
        return self.ledger.apply(event, NOWHERE if position is None else position)

    def _asked(self, event: ReplacementRequested, _: Position | None) -> bool:
        if group := self.group(event.group_id):
            group.is_asked = True
        return group is not None

    def __iter__(self) -> Iterator[Sample]:
        """Yield kept samples, group by group, the oldest first."""
        self._settle()
        for group in self._kept():
            yield from group.samples.values()

    def get(self, group_id: str, number: int) -> Sample | None:
        """Return the sample, if it is kept."""
        self._settle()
        group = self.groups.get(group_id)
        return None if group is None else group.samples.get(number)

    @property
    def open(self) -> list[Sample]:
        """Issued samples of open training groups, by number."""
        self._settle()
        numbers = {g.number: g for g in self._open.values() if g.number is not None}
        groups = (group for _, group in sorted(numbers.items()))
        found = (sample for group in groups for _, sample in sorted(group.samples.items()))
        return [sample for sample in found if sample.group.issued >> sample.number & 1]

    def group(self, group_id: str) -> Group | None:
        """Return the group of this id; None: no group can have this id, or it is not wanted."""
        group = self.groups.get(group_id)
        if group is not None or (self._wants is not None and group_id not in self._wants):
            return group
        number = issue_number(group_id)
        if number is None and evaluation_id(group_id) is None:
            return None
        group = self.groups[group_id] = Group(group_id, number)
        if number is not None and self.ledger.is_closed(number):
            group.is_closed = True
        elif number is not None:
            self._open[group_id] = group
        return group

    def _prompt(self, event: Prompt, position: Position | None) -> bool:
        if event.replaces and (old := self.group(event.replaces)):
            old.replaced_by = old.replaced_by or event.group_id
        if (group := self._meet(PROMPTS, event)) is None:
            return False
        number = event.sample
        group.size = group.size or max(1, min(event.group_size, MAX_SAMPLES))
        bit = 1 << number
        group.issued |= bit
        self.counts["issued"] += 1
        self.counts["to_roll_out"] += group.is_awaited(bit)
        if group.number is None:
            self._evaluation(group)[1].num_issued += 1
        else:
            self.group_size = event.group_size
            self.last_group = max(self.last_group, group.number)
        place = self._place(group, number, position)
        if (sample := self._sample(group, number)) is not None:
            sample.prompt, sample.issued_at_ms = place, event.issued_at_ms
            sample.min_policy_version = event.min_policy_version
        return True

    def _trajectory(self, event: Trajectory, position: Position | None) -> bool:
        if (group := self._meet(TRAJECTORIES, event)) is None:
            return False
        number, bit = event.sample, 1 << event.sample
        counts = self.counts
        counts["to_roll_out"] -= group.is_awaited(bit)
        group.rolled_out |= bit
        counts["rolled_out"] += 1
        if group.number is None:
            row, tally = self._evaluation(group)
            tally.answer(event, row, was_dead=bool(group.dead & bit))
        elif not (group.dead_early | group.trained) & bit:
            counts["scorable"] += 1
            counts["closed"] += group.is_closed
        self.spent.sampled(group, event)
        place = self._place(group, number, position)
        if (sample := self._sample(group, number)) is not None:
            sample.trajectory = place
            sample.describe(event)
            self._measure(sample)
        self._forget_answered(group, number)
        return True

    def _scored(self, event: ScoredTrajectory, position: Position | None) -> bool:
        if (group := self._meet(SCORED, event.trajectory)) is None:
            return False
        number = event.trajectory.sample
        group.scored |= 1 << number
        self.counts["scored"] += 1
        place = self._place(group, number, position)
        if (sample := self._sample(group, number)) is not None:
            sample.scored = place
            try:
                found = mismatch(event)
            except TensorError:
                return True
            sample.mismatch = None if math.isnan(found) else found
        return True

    def _meet(self, topic: Topic, event: Prompt | Trajectory) -> Group | None:
        """Return the group, if this is the sample's first record here, and its id fits its purpose.

        The first record counts: one that contradicts itself is taken as seen, and changes nothing.
        """
        group = self.group(event.group_id)
        if group is None or not 0 <= event.sample < MAX_SAMPLES:
            return None
        is_first = self._first[topic.name].is_first(group.id, event.sample)
        return group if is_first and event.purpose == group.purpose else None

    def _evaluation(self, group: Group) -> tuple[int, EvalCounts]:
        """Return the row of an evaluation's group, and the tally of its version."""
        identity = evaluation_id(group.id)
        assert identity is not None, "a group is of one kind or the other"
        version, row = identity
        return row, self.evaluations.setdefault(version, EvalCounts())

    def _letter(self, event: DeadLetter, _: Position | None) -> bool:
        letters = self.letters.setdefault(event.reason, Letters())
        letters.num, letters.newest = letters.num + 1, f"{event.worker}: {event.detail}"
        group = self.group(event.group_id)
        if group is None or not 0 <= event.sample < MAX_SAMPLES:
            place = place_of(event.origin_partition, event.origin_offset)
            if place != NO_PLACE:
                self._nameless.setdefault((event.origin_topic, place), event)
                self._unmatched.add((event.origin_topic, place))
            if self._keeps == OPEN:  # few samples: else the next query looks for it
                self._settle()
            return False
        return self._die(group, event.sample, event)

    def _die(self, group: Group, number: int, letter: DeadLetter) -> bool:
        bit = 1 << number
        if group.dead & bit:
            return False
        before = group.flow()
        group.dead |= bit
        group.dead_early |= bit if letter.role in _EARLY else 0
        self._count(f"dead_at_{letter.role}", group, before)
        if group.number is None:
            self._evaluation(group)[1].num_dead += not group.rolled_out & bit
        elif letter.purpose == TRAIN or not letter.group_id:
            self._end(group, bit, Outcome.DEAD, letter.reason, letter.at_ms)
        if (sample := self._sample(group, number)) is not None:
            sample.dead = letter.reason
        self._forget_answered(group, number)
        return True

    def _place(self, group: Group, number: int, position: Position | None) -> int:
        """Return the place of a first record; apply a dead letter about it that names no sample."""
        if position is None:
            return NO_PLACE
        place = place_of(position.partition, position.offset)
        if (letter := self._nameless.get((position.topic, place))) is not None:
            self._die(group, number, letter)
        return place

    def _settle(self) -> None:
        """Look once for the samples of dead letters that name none, among all kept samples."""
        if not self._unmatched:
            return
        for group in list(self._kept()):
            for sample in list(group.samples.values()):
                for origin in sample.origins:
                    if origin in self._unmatched:
                        self._die(group, sample.number, self._nameless[origin])
        self._unmatched.clear()

    def _step(self, event: StepCompleted, _: Position) -> None:
        touched = {s.group_id for s in event.samples} | {s.group_id for s in event.absent}
        groups = {name: group for name in touched if (group := self.group(name)) is not None}
        before = [(group, group.flow()) for group in groups.values()]
        for group in groups.values():
            group.step = group.step or event.step
        for absent in event.absent:
            if (found := groups.get(absent.group_id)) and 0 <= absent.sample < MAX_SAMPLES:
                self._leave_out(found, absent, event)
        for place, ref in enumerate(event.samples):
            if (found := groups.get(ref.group_id)) and 0 <= ref.sample < MAX_SAMPLES:
                self._train(found, ref, place, event)
        for group in groups.values():
            self._end(group, group.trained, Outcome.TRAINED, "", event.finished_at_ms)
        self._close(before)

    def _leave_out(self, group: Group, absent: AbsentSample, event: StepCompleted) -> None:
        self._end(group, 1 << absent.sample, Outcome.ABSENT, absent.reason, event.finished_at_ms)
        if (sample := self._sample(group, absent.sample)) is not None:
            sample.absent = sample.absent or absent.reason

    def _train(self, group: Group, ref: SampleRef, place: int, event: StepCompleted) -> None:
        bit = 1 << ref.sample
        if group.trained & bit:
            return
        group.trained |= bit
        self.spent.trained(group, ref.sample)
        if (sample := self._sample(group, ref.sample)) is None:
            return
        sample.step, sample.place, sample.advantage = event.step, place, ref.advantage
        sample.staleness = event.policy_version - 1 - ref.oldest_policy_version
        if sample.tokens is None:
            sample.reward, sample.version = ref.reward, ref.oldest_policy_version
            sample.at_ms = event.started_at_ms
        self._measure(sample)

    def _drop(self, event: GroupsDropped, _: Position) -> None:
        before = []
        for dropped in event.groups:
            group = self.group(dropped.group_id)
            if group is None or group.number is None:
                continue
            before.append((group, group.flow()))
            group.dropped = group.dropped or dropped
            everybody = (1 << (group.size or self.group_size)) - 1
            self._end(group, everybody, Outcome.DROPPED, dropped.reason, event.dropped_at_ms)
        self._close(before)

    def _close(self, named: Iterable[tuple[Group, tuple[int, int, int]]]) -> None:
        """Close the groups that an event names (with their flow before), and all that it closed."""
        ids, is_closed = {group.id for group, _ in named}, self.ledger.is_closed
        numbered = [(g, g.number) for g in self._open.values() if g.number is not None]
        others = [(g, g.flow()) for g, number in numbered if g.id not in ids and is_closed(number)]
        for group, before in (*named, *others):
            group.is_closed = True
            self._count("", group, before)
            self._open.pop(group.id, None)
            if self._keeps == OPEN:
                group.samples = {}

    def _end(self, group: Group, bits: int, outcome: Outcome, reason: str, at_ms: int) -> None:
        """Notify listeners of samples that had not ended before."""
        if fresh := bits & ~group.ended:
            group.ended |= fresh
            for listener in self._on_end:
                listener(EndedCount(outcome, reason, fresh.bit_count(), at_ms))

    def _count(self, what: str, group: Group, before: tuple[int, int, int]) -> None:
        """Count one sample, and the change of its group's flow."""
        counts = self.counts
        if what:
            counts[what] += 1
        after = group.flow()
        counts["to_roll_out"] += after[0] - before[0]
        counts["scorable"] += after[1] - before[1]
        counts["closed"] += after[2] - before[2]

    def _sample(self, group: Group, number: int) -> Sample | None:
        """Return the sample, made at its first mention; None if it is not kept."""
        sample = group.samples.get(number)
        is_over = group.is_closed or (group.number is None and group.is_over(number))
        if sample is not None or (is_over and self._keeps == OPEN):
            return sample
        if self._keeps == OPEN:
            self._open[group.id] = group
        elif not group.samples:
            self._holders.append(group)
        sample = group.samples[number] = Sample(group, number)
        self._num_kept += 1
        while self._num_kept > self._keeps > OPEN and self._holders[0] is not group:
            oldest = self._holders.popleft()
            self.num_forgotten += len(oldest.samples)
            self._num_kept -= len(oldest.samples)
            oldest.samples = {}
        return sample

    def _forget_answered(self, group: Group, number: int) -> None:
        """Drop a held-out sample that is over, where only open ones are kept."""
        if self._keeps == OPEN and group.number is None:
            group.samples.pop(number, None)
            if not group.samples:
                self._open.pop(group.id, None)

    def _kept(self) -> Iterable[Group]:
        return self._holders if self._keeps else self._open.values()

    def _measure(self, sample: Sample) -> None:
        """Count a trained sample, once its step and its trajectory were read."""
        if sample.step is not None and sample.tokens is not None:
            self.known[sample.step] += 1
            self.truncated[sample.step] += sample.ended == TRUNCATED
