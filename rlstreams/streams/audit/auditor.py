"""Reads a run's topics, and nothing else, and reports the state of every sample.

A run may go on while it is audited, so the order of reading is the proof. Committed positions
come first: records that a group is done with by then must have left their output in the log. Then
the topics' ends, consumers' before producers': a record refers only to records below the later end.
`steps` comes first of the topics, and at last once more, for weights that are newer than that.
A record can be committed and still be hidden, as long as an older transaction of its partition is
open; so an apparent breach is read again until such transactions are over.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import chain

from rlstreams.schemas.events import Event
from rlstreams.streams.audit.classes import Classes, Reached
from rlstreams.streams.audit.fold import AuditFold
from rlstreams.streams.audit.ledger import UnreadStep
from rlstreams.streams.audit.report import AuditReport, Breach, BreachKind
from rlstreams.streams.ledger import DISOWNABLE
from rlstreams.streams.log.bus import Bus, Closing, existing
from rlstreams.streams.log.errors import ConfigError, NoGroupsError
from rlstreams.streams.log.read_to import DELIVERY_S, read_to
from rlstreams.streams.log.record import Partition, Position, RawRecord
from rlstreams.streams.log.topics import (
    CALLS,
    DEAD_LETTERS,
    OUTCOMES,
    POLICY_PULLS,
    POLICY_VERSIONS,
    PROMPTS,
    SCORED,
    STEPS,
    TRAJECTORIES,
    Topic,
)

ROLLOUT_GROUP = "rollout"
LOGPROB_GROUP = "logprob"
SETTLE_S = 35.0  # longer than any transaction may stay open (30 s)
BATCH = 100  # records of a poll; few enough for memory where each has megabytes

# In the order in which their ends are asked for, after `steps`; read in the opposite order, so that
# a record is read behind the records that it refers to.
_TOPICS: tuple[Topic, ...] = (
    DEAD_LETTERS,
    SCORED,
    TRAJECTORIES,
    OUTCOMES,
    CALLS,
    POLICY_PULLS,
    POLICY_VERSIONS,
    PROMPTS,
)
_MAY_HEAL = frozenset(
    {
        BreachKind.LOST,
        BreachKind.MISSING_GROUP,
        BreachKind.MISSING_SAMPLE,
        BreachKind.NEVER_ISSUED,
        BreachKind.UNKNOWN_LOAD,
        BreachKind.UNPUBLISHED,
        BreachKind.FALSE_VERSION,
        BreachKind.FORGED_SCORE,
        BreachKind.FORGED_SAMPLE,
        BreachKind.UNDELIVERED,
    }
)


class ReplayedError(ConfigError):
    """A replay wrote the records that the audit judges by: they name positions of another log."""


Hanging = Callable[[], Sequence[Breach]]
Ends = Mapping[Partition, int]


def audit(bus: Bus, *, settle_s: float = SETTLE_S) -> AuditReport:
    """Audit the run that `bus` is bound to, once.

    Args:
        bus: the run's topics.
        settle_s: how long breaches may take to heal before they are believed.

    Raises:
        TopicMismatchError: a topic of the run is missing.
        ReplayedError: a replay wrote its steps, or its scores where there is no step.
        DeadlineError: a partition did not deliver up to its end.
    """
    with Auditor(bus) as auditor:
        return auditor.round(settle_s)


class Auditor(Closing):
    """Audits again and again, each time from where it stopped; raises as `audit`.

    Args:
        bus: the run's topics.
        hanging: returns breaches of transactions open beyond their timeout; by default none.
    """

    def __init__(self, bus: Bus, *, hanging: Hanging = tuple) -> None:
        self._bus = bus
        self._hanging = hanging
        # Events of `steps`, read ahead for their versions.
        self._later: list[tuple[Event | UnreadStep, Position]] = []
        self._topics = existing(bus, _TOPICS)
        self._reached: Reached | None = None  # each round asks anew, before it reads
        beginnings = {topic: bus.beginnings(topic.name) for topic in (STEPS, *self._topics)}
        expired = {p: n for firsts in beginnings.values() for p, n in firsts.items() if n}
        self._fold = AuditFold(expired, bus.schemas())
        self._stack = ExitStack()
        self._tails = {
            topic: self._stack.enter_context(Tail(bus, firsts))
            for topic, firsts in beginnings.items()
        }

    def round(self, settle_s: float = SETTLE_S) -> AuditReport:
        """Read on up to now; return the report on every sample.

        Args:
            settle_s: how long breaches may take to heal before they are believed.
        """
        self._reached = self._ask_reached()
        steps = self._bus.ends(STEPS.name)
        ends = self._ends(self._topics)
        for step, position in chain(self._later, self._steps(steps)):
            self._fold.train(step, position)
        self._later = []
        self._read(ends)
        self._fold.mark_issued()
        self._read(self._ends((PROMPTS,)))
        return self._settled(settle_s)

    def close(self) -> None:
        """Release the readers."""
        self._stack.close()

    def _settled(self, settle_s: float) -> AuditReport:
        """Return the report, once it is clean or `settle_s` has passed; samples of `steps` stay.

        In a recording nothing heals.
        """
        is_recording = self._reached is None
        deadline = time.monotonic() + settle_s
        hanging = self._hanging()
        report = self._report()
        while not is_recording and _may_heal(report) and time.monotonic() < deadline:
            time.sleep(0.2)
            self._read(self._ends(self._topics))
            report = self._report()
        return report.with_breaches(hanging)

    def _report(self) -> AuditReport:
        """Return the fold's report; of newer steps it knows the versions alone."""
        if topic := self._fold.replayed:
            raise ReplayedError(
                f"records of {topic} were written by a replay, and name positions of the recorded "
                "log: audit the recording (rlstreams audit RECORDING)"
            )
        self._later += self._steps(self._bus.ends(STEPS.name))
        return Classes(self._fold, self._reached).report()

    def _ask_reached(self) -> Reached | None:
        """Return the committed positions of groups; None for a recording, which holds no groups."""
        try:
            return Reached(
                rollout=self._bus.committed(ROLLOUT_GROUP, PROMPTS.name),
                logprob=self._bus.committed(LOGPROB_GROUP, TRAJECTORIES.name),
            )
        except NoGroupsError:
            return None

    def _ends(self, topics: Sequence[Topic]) -> dict[Topic, Ends]:
        return {topic: self._bus.ends(topic.name) for topic in topics}

    def _read(self, ends: Mapping[Topic, Ends]) -> None:
        """Read these topics on; `steps` is not among them, for it has its own rules."""
        for topic in reversed(list(ends)):
            for raw in self._tails[topic].up_to(ends[topic]):
                self._fold.take(raw)

    def _steps(self, ends: Ends) -> Iterator[tuple[Event | UnreadStep, Position]]:
        """Yield events of `steps` to train; their versions and next events are noted before.

        A trainer disowns a foreign event soon after it came.
        """
        ahead: deque[tuple[Event | UnreadStep, Position]] = deque()
        for raw in self._tails[STEPS].up_to(ends):
            step = self._fold.foresee(raw)
            if step is not None:
                ahead.append((step, raw.position))
            if len(ahead) > DISOWNABLE:
                yield ahead.popleft()
        yield from ahead


def _may_heal(report: AuditReport) -> bool:
    return any(breach.kind in _MAY_HEAL for breach in report.breaches)


class Tail(Closing):
    """A reader that goes on from stretch to stretch.

    Args:
        beginnings: first offset of each partition.
        deadline_s: longest wait for the next record below a known end.
    """

    def __init__(
        self, bus: Bus, beginnings: Mapping[Partition, int], deadline_s: float = DELIVERY_S
    ) -> None:
        self._reader = bus.reader(beginnings)
        self._deadline_s = deadline_s

    def up_to(self, ends: Mapping[Partition, int]) -> Iterator[RawRecord]:
        """Yield the records below `ends` that no earlier call has yielded.

        Raises:
            DeadlineError: a partition did not deliver up to its end; names it.
        """
        is_beyond = False
        for records in read_to(self._reader, ends, self._deadline_s, batch=BATCH):
            for raw in records:
                if raw.position.offset < ends.get(raw.partition, 0):
                    yield raw
                else:
                    is_beyond = True
        if is_beyond:
            self._reader.seek(ends)

    def close(self) -> None:
        """Release the reader."""
        self._reader.close()
