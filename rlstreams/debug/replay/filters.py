"""Selection of a recording's records: what was asked for, resolved by what the recording holds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime

from rlstreams.debug.replay.record import groups_of_steps
from rlstreams.schemas.events import StepCompleted
from rlstreams.streams.log.errors import ConfigError
from rlstreams.streams.log.record import RawRecord
from rlstreams.streams.log.text import utc_text
from rlstreams.streams.recording import NotRecordedError, Recording
from rlstreams.streams.recording.bus import RecordingBus
from rlstreams.streams.recording.selection import Range, Selection


def resolve(
    recording: Recording, selection: Selection, begin: str = "", end: str = ""
) -> Selection:
    """The selection with the groups of its steps, and the times of two moments.

    Args:
        begin, end: as of `moment`; empty: none.

    Raises:
        NotRecordedError, ConfigError: a step or a moment that is not there.
    """
    if selection.steps is not None:
        groups = groups_of_steps(RecordingBus(recording), selection.steps)
        if not groups:
            known = [record.event.step for record in recording.events(StepCompleted)]
            there = f"steps {min(known)} to {max(known)}" if known else "no completed step"
            raise NotRecordedError(f"none of the steps asked for is recorded: there is {there}")
        both = groups if selection.groups is None else selection.groups & groups
        selection = replace(selection, groups=both)
    if begin or end:
        ends = {"first": begin, "last": end}
        span = Range(**{name: moment(recording, text) for name, text in ends.items() if text})
        selection = replace(selection, time_ms=span)
    return selection


def chosen(recording: Recording, selection: Selection) -> Iterator[RawRecord]:
    """The records of a selection, in the order of the recording."""
    is_all = selection == Selection()
    for raw in recording.records(selection.topics):
        if is_all or selection.wants(raw, recording.event(raw)):
            yield raw


def moment(recording: Recording, text: str) -> int:
    """Milliseconds since 1970 of `step:7` (when it could begin), `version:5`, `+30`, or a time.

    Raises:
        NotRecordedError: outside the recording; says what is there.
        ConfigError: none of these.
    """
    if recording.time_span is None:
        raise NotRecordedError(f"{recording.folder} holds no record")
    first, last = recording.time_span
    kind, _, number = text.partition(":")
    if kind in ("step", "version") and number.isdecimal():
        return _announced(recording, kind, int(number), first)
    try:
        found = first + round(float(text) * 1000) if text.startswith("+") else None
    except ValueError:
        found = None
    if found is None:
        found = _time_ms(text)
    if not first <= found <= last:
        raise NotRecordedError(
            f"{text} is outside the recording, which goes from {_time_text(first)} to "
            f"{_time_text(last)} (+{(last - first) / 1000:.1f})"
        )
    return found


def _time_ms(text: str) -> int:
    """Milliseconds since 1970 of an ISO time (UTC where it names no zone), or of that number."""
    try:
        if text.isdecimal():
            return int(text)
        when = datetime.fromisoformat(text)
    except ValueError:
        raise ConfigError(
            "a moment is step:N, version:N, +SECONDS, a time like 2026-11-21T10:30:00, or "
            f"milliseconds, got {text!r}"
        ) from None
    return round((when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp() * 1000)


def _announced(recording: Recording, kind: str, number: int, first_ms: int) -> int:
    """When a step could begin, or a version was made: at the end of the step before."""
    wanted = number - 1 if kind == "step" else number
    if wanted == 0:
        return first_ms
    times: dict[int, int] = {}
    for record in recording.events(StepCompleted):
        made = record.event.step if kind == "step" else record.event.policy_version
        times.setdefault(made, record.raw.timestamp_ms)
    if (kind == "step" and number not in times) or wanted not in times:
        there = f"{kind}s {min(times)} to {max(times)}" if times else f"no {kind} at all"
        raise NotRecordedError(f"{kind}:{number} is outside the recording: it holds {there}")
    return times[wanted]


def _time_text(ms: int) -> str:
    """UTC, as it can be typed again; to a thousandth of a second."""
    return f"{utc_text(ms, 'T')}.{ms % 1000:03}"
