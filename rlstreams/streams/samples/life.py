"""One sample, its group and its evaluation, in numbers: the state that `fold` keeps.

Each group keeps a few integers, however long the run; a `Sample` is kept as long as it may be asked
for. No payload is kept.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from rlstreams.schemas.events import EVALUATE, NO_VERSION, TRAIN, DroppedGroup, Trajectory
from rlstreams.streams.log.record import NO_PLACE
from rlstreams.streams.log.topics import PROMPTS, SCORED, TRAJECTORIES
from rlstreams.streams.segments import is_sampled, num_sampled

_TOPICS = (PROMPTS.name, TRAJECTORIES.name, SCORED.name)


class Outcome(StrEnum):
    """The outcome of a sample."""

    UNKNOWN = "unknown"  # no record names it
    ISSUED = "issued"  # waits for a rollout worker, or is being sampled
    ROLLED_OUT = "rolled out"  # waits for its scores
    SCORED = "scored"  # waits for the trainer
    EVALUATED = "evaluated"
    TRAINED = "trained"
    ABSENT = "left out"  # its group was trained without it
    DROPPED = "dropped"
    DEAD = "dead-lettered"


class EndedCount(NamedTuple):
    """Training samples that ended: each is announced once, by the first event that ends it."""

    outcome: Outcome
    reason: str  # of the dead letter, the step or the drop; "": trained
    num: int
    at_ms: int


@dataclass(slots=True, eq=False)
class Group:
    """One group. A set of samples is an integer: bit n is sample n."""

    id: str
    number: int | None  # None: an evaluation's
    size: int = 0  # by its first prompt; 0: none was read
    issued: int = 0
    rolled_out: int = 0
    scored: int = 0  # set where scores are read
    dead: int = 0
    dead_early: int = 0  # before the trainer
    trained: int = 0
    ended: int = 0  # announced in `EndedCount`
    step: int = 0  # number of the step that trained it; 0: none
    dropped: DroppedGroup | None = None
    replaced_by: str = ""
    is_asked: bool = False  # an operator requested a group in its place
    is_closed: bool = False
    samples: dict[int, Sample] = field(default_factory=dict)  # kept samples

    @property
    def purpose(self) -> str:
        """TRAIN or EVALUATE, by its id."""
        return EVALUATE if self.number is None else TRAIN

    def is_over(self, number: int) -> bool:
        """Whether the held-out sample was answered or is dead."""
        return bool((self.rolled_out | self.dead) >> number & 1)

    def is_awaited(self, bit: int) -> bool:
        """Whether a rollout of the issued sample is still needed."""
        is_over = self.is_closed or (self.rolled_out | self.dead | self.trained) & bit
        return not is_over and bool(self.issued & bit)

    def why_untrained(self, number: int) -> str:
        """Return why no step trains the sample, in a word; "": it was trained, or still may be."""
        if self.trained >> number & 1:
            return ""
        if self.dead >> number & 1:
            return "dead_letter"
        if self.step:
            return "left_out"
        return "" if self.dropped is None else self.dropped.reason

    def flow(self) -> tuple[int, int, int]:
        """Return the numbers of samples still to roll out, of training samples that reached the
        log-prob worker and did not die before the trainer, and of these in closed groups."""
        if self.number is None:
            return (self.issued & ~self.rolled_out & ~self.dead).bit_count(), 0, 0
        done = self.rolled_out | self.trained
        waiting = 0 if self.is_closed else (self.issued & ~done & ~self.dead).bit_count()
        scorable = (done & ~self.dead_early).bit_count()
        return waiting, scorable, scorable if self.is_closed else 0


@dataclass(slots=True, eq=False)
class Sample:
    """One sample, by its first records and the ledger; None, -1, "": not known, or not yet."""

    group: Group
    number: int
    prompt: int = NO_PLACE  # place of the first record in that topic, as the next two
    trajectory: int = NO_PLACE
    scored: int = NO_PLACE
    min_policy_version: int = NO_VERSION
    issued_at_ms: int = 0
    worker: str = ""  # that rolled it out
    reward: float | None = None
    tokens: int | None = None  # sampled by the policy
    version: int | None = None  # the oldest that sampled a token
    ended: str = ""  # finish reason of its last segment
    at_ms: int = 0  # when it was sampled
    duration: int | None = None  # of the rollout, ms
    mismatch: float | None = None  # largest of its tokens, nats
    step: int | None = None  # number of the step that trained it
    place: int = -1  # in the batch of that step, from 0
    advantage: float | None = None
    staleness: int | None = None  # of its oldest trained token, versions
    absent: str = ""  # why its group's step left it out
    dead: str = ""  # reason of its first dead letter

    @property
    def name(self) -> str:
        """`GROUP/SAMPLE`."""
        return f"{self.group.id}/{self.number}"

    @property
    def purpose(self) -> str:
        """Train or evaluate."""
        return self.group.purpose

    @property
    def is_rolled_out(self) -> bool:
        """Whether its trajectory was read."""
        return bool(self.group.rolled_out >> self.number & 1)

    @property
    def is_dead(self) -> bool:
        """Whether a dead letter names it."""
        return bool(self.group.dead >> self.number & 1)

    def describe(self, event: Trajectory) -> None:
        """Take the figures of its trajectory."""
        tokens, versions, ended = 0, [], ""
        for segment in event.segments:
            if is_sampled(segment):
                tokens += len(segment.token_ids)
                versions.append(segment.policy_version)
                ended = segment.finish_reason
        if versions:
            self.version = min(versions)
        self.tokens, self.ended, self.worker = tokens, sys.intern(ended), sys.intern(event.worker)
        self.reward, self.at_ms = event.reward, event.finished_at_ms
        self.duration = event.finished_at_ms - event.started_at_ms

    @property
    def origins(self) -> tuple[tuple[str, int], ...]:
        """Topic and place of each of its first records."""
        places = (self.prompt, self.trajectory, self.scored)
        return tuple(zip(_TOPICS, places, strict=True))

    @property
    def outcome(self) -> Outcome:
        """Its outcome, by all records read so far."""
        group, bit = self.group, 1 << self.number
        known = {
            Outcome.TRAINED: group.trained & bit,
            Outcome.DEAD: group.dead & bit,
            Outcome.ABSENT: self.absent,
            Outcome.DROPPED: group.dropped is not None and not group.step,
            Outcome.EVALUATED: group.number is None and group.rolled_out & bit,
            Outcome.SCORED: group.scored & bit,
            Outcome.ROLLED_OUT: group.rolled_out & bit,
            Outcome.ISSUED: group.issued & bit,
        }
        return next((outcome for outcome, holds in known.items() if holds), Outcome.UNKNOWN)

    @property
    def after(self) -> str:
        """Its outcome with step or reason: `step 12`, `dropped: stale`, `dead-lettered: reward`."""
        outcome, drop = self.outcome, self.group.dropped
        if outcome is Outcome.TRAINED:
            return f"step {self.group.step}"
        whys = {
            Outcome.DEAD: self.dead,
            Outcome.ABSENT: self.absent,
            Outcome.DROPPED: "" if drop is None else drop.reason,
        }
        why = whys.get(outcome, "")
        return f"{outcome}: {why}" if why else str(outcome)


@dataclass(slots=True)
class EvalCounts:
    """The held-out samples of one policy version: issued, answered and dead; their rewards."""

    num_issued: int = 0
    num_answered: int = 0
    num_dead: int = 0  # dead samples without an answer
    reward: float = 0.0  # sum
    best: dict[int, float] = field(default_factory=dict)  # by row, where one has several samples
    tokens: int = 0
    finished_at_ms: int = 0
    is_right_or_wrong: bool = True  # every reward was 0 or 1

    def answer(self, event: Trajectory, row: int, *, was_dead: bool) -> None:
        """Take the first answer of a sample."""
        self.num_answered += 1
        self.num_dead -= was_dead
        self.reward += event.reward
        self.is_right_or_wrong &= event.reward in (0.0, 1.0)
        self.tokens += num_sampled(event)
        self.finished_at_ms = max(self.finished_at_ms, event.finished_at_ms)
        if event.group_size > 1:
            self.best[row] = max(event.reward, self.best.get(row, event.reward))


@dataclass(slots=True)
class Letters:
    """Dead letters of one reason, those that name no sample and later ones of a sample included."""

    num: int = 0
    newest: str = ""  # worker and detail of the newest
