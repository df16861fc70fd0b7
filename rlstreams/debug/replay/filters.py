"""Which records of a recording are played: what was asked for, resolved with its index."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from rlstreams.streams.log.errors import ConfigError
from rlstreams.streams.log.record import Partition, RawRecord
from rlstreams.streams.log.utc import utc_text
from rlstreams.streams.recording import NotRecordedError, Recording
from rlstreams.streams.recording.facts import facts_of
from rlstreams.streams.recording.selection import Range, Selection

ONLY, WITHOUT = "only", "without"


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordFilter:
    """What was asked for beyond a selection; it takes the index to resolve it."""

    selection: Selection
    rewards: Range | None = None
    staleness: Range | None = None  # of trained samples, versions
    dead_letters: str = ""  # ONLY groups with one, or WITHOUT
    begin: str = ""  # a moment: `step:7`, `version:5`, `+30` seconds, an ISO time
    end: str = ""


def resolve(recording: Recording, record_filter: RecordFilter) -> Selection:
    """The selection with every group and sample named.

    Raises:
        NotRecordedError: steps or a moment outside the recording, or nothing that fits.
    """
    selection = record_filter.selection
    if selection.steps is not None:
        selection = _with_groups(selection, _groups_of_steps(recording, selection.steps))
    if record_filter.dead_letters:
        selection = _with_groups(selection, _dead(recording, record_filter.dead_letters))
    if record_filter.rewards is not None:
        selection = _with_samples(
            selection, _rewarded(recording, record_filter.rewards), "--rewards"
        )
    if record_filter.staleness is not None:
        found = frozenset(
            (fact.group_id, fact.sample)
            for fact in recording.index.trained()
            if fact.staleness in record_filter.staleness
        )
        selection = _with_samples(selection, found, "--staleness")
    if record_filter.begin or record_filter.end:
        first = moment(recording, record_filter.begin) if record_filter.begin else -float("inf")
        last = moment(recording, record_filter.end) if record_filter.end else float("inf")
        given = selection.time_ms or Range()
        span = Range(first=max(first, given.first), last=min(last, given.last))
        selection = replace(selection, time_ms=span)
    return selection


def chosen(
    recording: Recording, selection: Selection, start: Mapping[Partition, int] | None = None
) -> Iterator[RawRecord]:
    """The records of a selection, in the order of the recording; from offsets `start` on."""
    is_all = selection == Selection()
    for raw in recording.records(selection.topics, start=start):
        if is_all:
            yield raw
            continue
        event = recording.event(raw)
        if selection.wants(raw, event, facts_of(event)):
            yield raw


def moment(recording: Recording, text: str) -> int:
    """Milliseconds since 1970 of `step:7` (when it could begin), `version:5`, `+30`, or a time.

    Raises:
        NotRecordedError: outside the recording; says what is there.
        ConfigError: none of these.
    """
    kind, _, number = text.partition(":")
    span = recording.index.time_span()
    if span is None:
        raise NotRecordedError(f"{recording.folder} holds no record")
    first, last = span
    if kind in ("step", "version") and number.isdecimal():
        return _announced(recording, kind, int(number), first)
    try:
        if text.startswith("+"):
            found = first + round(float(text.removeprefix("+").removesuffix("s")) * 1000)
        elif text.isdecimal():
            found = int(text)
        else:
            when = datetime.fromisoformat(text)
            found = round((when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp() * 1000)
    except ValueError:
        raise ConfigError(
            f"a moment is step:N, version:N, +SECONDS or a time, got {text!r}"
        ) from None
    if not first <= found <= last:
        raise NotRecordedError(
            f"{text} is outside the recording, which goes from {time_text(first)} to "
            f"{time_text(last)} (+{(last - first) / 1000:.1f})"
        )
    return found


def _announced(recording: Recording, kind: str, number: int, first_ms: int) -> int:
    """When a step could begin, or a version was made: at the end of the step before."""
    event = "StepCompleted"
    column = "step" if kind == "step" else "version"
    wanted = number - 1 if kind == "step" else number
    known = sorted(
        {
            getattr(entry.facts, column)
            for entry in recording.index.entries("f.event = ?", [event])
            if getattr(entry.facts, column) is not None
        }
    )
    if wanted == 0:
        return first_ms
    limit = known[-1] if known else 0
    if (kind == "step" and number not in known) or wanted not in known:
        there = f"{kind}s {known[0]} to {limit}" if known else f"no {kind} at all"
        raise NotRecordedError(f"{kind}:{number} is outside the recording: it holds {there}")
    where = f"f.event = ? AND r.{column} = ? LIMIT 1"
    return next(recording.index.entries(where, [event, wanted])).timestamp_ms


def _groups_of_steps(recording: Recording, steps: Range) -> frozenset[str]:
    trained = recording.index.trained()
    found = frozenset(fact.group_id for fact in trained if fact.step in steps)
    if not found:
        known = sorted({fact.step for fact in trained})
        there = f"steps {known[0]} to {known[-1]}" if known else "no completed step"
        raise NotRecordedError(f"none of the steps asked for is recorded: there is {there}")
    return found


def _dead(recording: Recording, which: str) -> frozenset[str]:
    dead = {
        entry.facts.group_id
        for entry in recording.index.entries("f.event = 'DeadLetter'")
        if entry.facts.group_id is not None
    }
    if which == ONLY:
        return frozenset(dead)
    where = "f.event = 'Prompt' OR f.event = 'Trajectory'"
    every = {entry.facts.group_id for entry in recording.index.entries(where)}
    return frozenset(group for group in every if group is not None and group not in dead)


def _rewarded(recording: Recording, rewards: Range) -> frozenset[tuple[str, int]]:
    where = "r.reward IS NOT NULL AND r.reward >= ? AND r.reward <= ?"
    entries = recording.index.entries(where, [rewards.first, rewards.last])
    return frozenset(
        (entry.facts.group_id, entry.facts.sample)
        for entry in entries
        if entry.facts.group_id is not None and entry.facts.sample is not None
    )


def _with_groups(selection: Selection, groups: frozenset[str]) -> Selection:
    both = groups if selection.groups is None else selection.groups & groups
    return replace(selection, groups=both)


def _with_samples(
    selection: Selection, samples: frozenset[tuple[str, int]], option: str
) -> Selection:
    if not samples:
        raise NotRecordedError(f"{option}: no sample of the recording fits")
    both = samples if selection.samples is None else selection.samples & samples
    return replace(selection, samples=both)


def time_text(ms: int) -> str:
    """UTC, as it can be typed again; to a thousandth of a second."""
    return f"{utc_text(ms, 'T')}.{ms % 1000:03}"
