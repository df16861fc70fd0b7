"""Reads a run's topics, and nothing else, and says where every sample is.

A run may go on while it is audited, so the order of reading is the proof. Committed positions
come first: what a group is done with by then must have left its output in the log. Then the
topics' ends, consumers' before producers': what a record refers to lies below the later end.
A record can be committed and still be hidden, as long as an older transaction of its partition is
open; so what looks wrong is read again until such transactions are over.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from contextlib import ExitStack

from schemas import DecodeError
from streams.audit_fold import AuditFold, Covered
from streams.audit_report import AuditReport, Breach, BreachKind
from streams.bus import Bus
from streams.codec import decoded
from streams.done_set import covered
from streams.errors import DeadlineError
from streams.record import Committed, Partition, RawRecord
from streams.topic import Topic
from streams.topics import (
    DEAD_LETTERS,
    POLICY_PULLS,
    PROMPTS,
    SCORED,
    STEPS,
    TRAJECTORIES,
)

ROLLOUT_GROUP = "rollout"
LOGPROB_GROUP = "logprob"
SETTLE_S = 35.0  # longer than any transaction may stay open (30 s)
READ_DEADLINE_S = 60.0  # longest wait for a single next record

_BATCH = 500
# Consumers before producers, `steps` first.
_SAMPLES: tuple[Topic, ...] = (DEAD_LETTERS, SCORED, TRAJECTORIES, POLICY_PULLS, PROMPTS)


def audit(
    bus: Bus, *, settle_s: float = SETTLE_S, read_deadline_s: float = READ_DEADLINE_S
) -> AuditReport:
    """Audit the run that `bus` is bound to.

    Args:
        bus: the run's topics.
        settle_s: how long breaches may take to heal before they are believed.
        read_deadline_s: longest wait for the next record below a known end.

    Raises:
        TopicMismatchError: a topic of the run is missing.
        DeadlineError: a partition did not deliver up to its end.
    """
    rollout = bus.committed(ROLLOUT_GROUP, PROMPTS.name)
    logprob = bus.committed(LOGPROB_GROUP, TRAJECTORIES.name)
    with ExitStack() as stack:
        tails = {
            topic: stack.enter_context(_Tail(bus, topic, read_deadline_s))
            for topic in (STEPS, *_SAMPLES)
        }
        fold = AuditFold(
            rollout_covers=_covers(rollout),
            logprob_covers=_covers(logprob),
            expired={p: n for tail in tails.values() for p, n in tail.beginnings.items() if n},
        )
        ends = {topic: bus.ends(topic.name) for topic in (STEPS, *_SAMPLES)}
        for topic, tail in tails.items():
            _apply(fold, tail.up_to(ends[topic]))
        fold.mark_issued()
        return _settled(bus, fold, {t: tails[t] for t in _SAMPLES}, settle_s)


def _settled(
    bus: Bus, fold: AuditFold, tails: Mapping[Topic, _Tail], settle_s: float
) -> AuditReport:
    """The report, once it is clean or `settle_s` has passed; `steps` stays as it was read."""
    deadline = time.monotonic() + settle_s
    _apply(fold, tails[PROMPTS].up_to(bus.ends(PROMPTS.name)))
    report = fold.report()
    while any(map(_may_heal, report.breaches)) and time.monotonic() < deadline:
        time.sleep(0.2)
        ends = {topic: bus.ends(topic.name) for topic in tails}
        for topic, tail in tails.items():
            _apply(fold, tail.up_to(ends[topic]))
        report = fold.report()
    return report


def _may_heal(breach: Breach) -> bool:
    return breach.kind in (
        BreachKind.LOST,
        BreachKind.MISSING_GROUP,
        BreachKind.MISSING_SAMPLE,
        BreachKind.NEVER_ISSUED,
        BreachKind.UNKNOWN_LOAD,
    )


def _apply(fold: AuditFold, records: Iterable[RawRecord]) -> None:
    for raw in records:
        try:
            event = decoded(raw).event
        except DecodeError:
            fold.unreadable(raw)
        else:
            fold.apply(event, raw.position)


def _covers(committed: Mapping[Partition, Committed]) -> Covered:
    def covers(partition: Partition, offset: int) -> bool:
        return covered(committed.get(partition), offset)

    return covers


class _Tail:
    """One topic, read in stretches: each ends where the topic ended when that was asked."""

    def __init__(self, bus: Bus, topic: Topic, deadline_s: float) -> None:
        self.beginnings = dict(bus.beginnings(topic.name))
        self._reader = bus.reader(self.beginnings)
        self._deadline_s = deadline_s
        self._ahead: list[RawRecord] = []  # delivered, but beyond the stretch

    def __enter__(self) -> _Tail:
        return self

    def __exit__(self, *_: object) -> None:
        self._reader.close()

    def up_to(self, ends: Mapping[Partition, int]) -> Iterable[RawRecord]:
        """The records below `ends` that no earlier stretch had."""
        waiting, self._ahead = self._ahead, []
        yield from self._below(ends, waiting)
        last_progress = time.monotonic()
        while behind := self._behind(ends):
            records = self._reader.poll(_BATCH, 0.2)
            yield from self._below(ends, records)
            if records or self._behind(ends) != behind:
                last_progress = time.monotonic()
            elif time.monotonic() - last_progress > self._deadline_s:
                raise DeadlineError(
                    f"audit: {', '.join(behind)}: nothing delivered for {self._deadline_s:g} s"
                )

    def _below(
        self, ends: Mapping[Partition, int], records: Iterable[RawRecord]
    ) -> Iterable[RawRecord]:
        for raw in records:
            if raw.position.offset < ends.get(raw.partition, 0):
                yield raw
            else:
                self._ahead.append(raw)

    def _behind(self, ends: Mapping[Partition, int]) -> list[str]:
        at = self._reader.positions()
        return [
            f"{partition} is at {at.get(partition, self.beginnings.get(partition, 0))} of {end}"
            for partition, end in sorted(ends.items())
            if at.get(partition, self.beginnings.get(partition, 0)) < end
        ]


__all__ = ["AuditFold", "AuditReport", "Breach", "BreachKind", "audit"]
