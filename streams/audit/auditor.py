"""Reads a run's topics, and nothing else, and says where every sample is.

A run may go on while it is audited, so the order of reading is the proof. Committed positions
come first: what a group is done with by then must have left its output in the log. Then the
topics' ends, consumers' before producers': what a record refers to lies below the later end.
`steps` comes first of the topics, and at last once more, for weights that are newer than that.
A record can be committed and still be hidden, as long as an older transaction of its partition is
open; so what looks wrong is read again until such transactions are over.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain

from rlstreams.schemas import DecodeError, UnknownEventError
from rlstreams.schemas.binary import HEADER_BYTES, MARKER
from rlstreams.schemas.events import Event
from rlstreams.streams.audit.classes import Classes, Coverage, Reached
from rlstreams.streams.audit.fold import AuditFold
from rlstreams.streams.audit.ledger import UnreadStep
from rlstreams.streams.audit.report import AuditReport, Breach, BreachKind
from rlstreams.streams.audit.sources import LARGE, OwnSource, SharedSource, Source
from rlstreams.streams.audit.tail import Tail
from rlstreams.streams.log.bus import Bus, Closing
from rlstreams.streams.log.codec import decoded
from rlstreams.streams.log.record import Partition, Position, RawRecord
from rlstreams.streams.log.topic import Topic
from rlstreams.streams.log.topics import (
    DEAD_LETTERS,
    POLICY_PULLS,
    POLICY_VERSIONS,
    PROMPTS,
    SCORED,
    STEPS,
    TRAJECTORIES,
)

ROLLOUT_GROUP = "rollout"
LOGPROB_GROUP = "logprob"
SETTLE_S = 35.0  # longer than any transaction may stay open (30 s)
READ_DEADLINE_S = 60.0  # longest wait for a single next record

# In the order in which their ends are asked for, `steps` before all of them.
_TOPICS: tuple[Topic, ...] = (
    DEAD_LETTERS,
    SCORED,
    TRAJECTORIES,
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
    }
)

Hanging = Callable[[], Sequence[Breach]]
Ends = Mapping[Partition, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Helpers:
    """Processes that share the reading of the large topics; worth their start for large runs."""

    num_processes: int
    open_bus: Callable[[], Bus]  # picklable: each process opens its own


def no_hanging() -> Sequence[Breach]:
    """Where nobody can be asked for open transactions."""
    return ()


def audit(
    bus: Bus,
    *,
    settle_s: float = SETTLE_S,
    read_deadline_s: float = READ_DEADLINE_S,
    hanging: Hanging = no_hanging,
    helpers: Helpers | None = None,
) -> AuditReport:
    """Audit the run that `bus` is bound to, once.

    Args:
        bus: the run's topics.
        settle_s: how long breaches may take to heal before they are believed.
        read_deadline_s: longest wait for the next record below a known end.
        hanging: asks for transactions that are open beyond their timeout.
        helpers: processes to share the reading with; None: this one reads.

    Raises:
        TopicMismatchError: a topic of the run is missing.
        DeadlineError: a partition did not deliver up to its end.
    """
    with Auditor(bus, read_deadline_s=read_deadline_s, hanging=hanging, helpers=helpers) as auditor:
        return auditor.round(settle_s)


class Auditor(Closing):
    """Audits again and again, each time from where it was; see `audit` for its arguments."""

    def __init__(
        self,
        bus: Bus,
        *,
        read_deadline_s: float = READ_DEADLINE_S,
        hanging: Hanging = no_hanging,
        helpers: Helpers | None = None,
    ) -> None:
        self._bus = bus
        self._hanging = hanging
        # Of `steps`, read ahead for its versions.
        self._later: list[tuple[Event | UnreadStep, RawRecord]] = []
        self._origins: set[Position] = set()  # of replayed records of the small topics
        self._reached = self._ask_reached()
        beginnings = {topic: bus.beginnings(topic.name) for topic in (STEPS, *_TOPICS)}
        expired = {p: n for firsts in beginnings.values() for p, n in firsts.items() if n}
        self._fold = AuditFold(expired)
        self._stack = ExitStack()
        self._tails = {
            topic: self._stack.enter_context(Tail(bus, topic, firsts, read_deadline_s))
            for topic, firsts in beginnings.items()
            if topic not in LARGE
        }
        large = {p: first for topic in LARGE for p, first in beginnings[topic].items()}
        source: Source = (
            OwnSource(bus, large, read_deadline_s)
            if helpers is None
            else SharedSource(helpers.open_bus, large, read_deadline_s, helpers.num_processes)
        )
        self._source = self._stack.enter_context(source)

    def round(self, settle_s: float = SETTLE_S) -> AuditReport:
        """Read on up to now; where every sample is.

        Args:
            settle_s: how long breaches may take to heal before they are believed.
        """
        self._reached = self._ask_reached()
        ends = self._ends((STEPS, *_TOPICS))
        for event, raw in self._later:
            self._fold.apply(event, raw.position)
        self._later.clear()
        for event, raw in self._events(STEPS, ends[STEPS]):
            self._fold.foresee(event)
            self._fold.apply(event, raw.position)
        self._read(ends)
        self._fold.mark_issued()
        self._read(self._ends((PROMPTS,)))
        return self._settled(settle_s)

    def close(self) -> None:
        """Release the readers."""
        self._stack.close()

    def _settled(self, settle_s: float) -> AuditReport:
        """The report, once it is clean or `settle_s` has passed; samples of `steps` stay."""
        deadline = time.monotonic() + settle_s
        hanging = self._hanging()
        self._foresee()
        report = Classes(self._fold, self._reached).report()
        while _may_heal(report) and time.monotonic() < deadline:
            time.sleep(0.2)
            self._read(self._ends(_TOPICS))
            self._foresee()
            report = Classes(self._fold, self._reached).report()
        return report.with_breaches(hanging)

    def _ask_reached(self) -> Reached:
        return Reached(
            rollout=Coverage(self._bus.committed(ROLLOUT_GROUP, PROMPTS.name)),
            logprob=Coverage(self._bus.committed(LOGPROB_GROUP, TRAJECTORIES.name)),
        )

    def _ends(self, topics: Sequence[Topic]) -> dict[Topic, Ends]:
        return {topic: self._bus.ends(topic.name) for topic in topics}

    def _read(self, ends: Mapping[Topic, Ends]) -> None:
        """Read these topics on, except `steps`, which has its own rules."""
        large = {p: end for topic in LARGE for p, end in ends.get(topic, {}).items()}
        for rows in self._source.rows(large):
            self._fold.add(rows)
        for topic, end in ends.items():
            if topic not in LARGE and topic is not STEPS:
                for event, raw in self._events(topic, end):
                    self._fold.apply(event, raw.position)

    def _foresee(self) -> None:
        """Which versions newer steps made, and no more of them yet."""
        for event, raw in self._events(STEPS, self._bus.ends(STEPS.name)):
            self._fold.foresee(event)
            self._later.append((event, raw))

    def _events(self, topic: Topic, ends: Ends) -> Iterator[tuple[Event | UnreadStep, RawRecord]]:
        for batches in self._tails[topic].up_to(ends):
            for raw in chain.from_iterable(batch.records() for batch in batches):
                origin = self._fold.replay.take(raw)
                if origin in self._origins:  # a replay that went back wrote it once before
                    self._fold.num_duplicates += 1
                    continue
                found: Event | UnreadStep
                try:
                    found = decoded(raw, self._bus.schemas()).event
                except DecodeError as err:
                    self._fold.num_unreadable += 1
                    if topic is not STEPS or not _may_be_event(raw, err):
                        continue
                    print_ = bytes(raw.value[len(MARKER) : HEADER_BYTES]).hex()
                    found = UnreadStep(raw.position, f"fingerprint {print_}: {err}")
                if origin is not None:
                    self._origins.add(origin)
                elif topic is STEPS and not isinstance(found, UnreadStep):
                    self._fold.replay.has_own_steps = True
                yield found, raw


def _may_be_event(raw: RawRecord, error: DecodeError) -> bool:
    """Framed as ours are, and not known to be an event that this release has no use for."""
    is_framed = raw.value[: len(MARKER)] == MARKER and len(raw.value) >= HEADER_BYTES
    return is_framed and not isinstance(error, UnknownEventError)


def _may_heal(report: AuditReport) -> bool:
    return any(breach.kind in _MAY_HEAL for breach in report.breaches)
