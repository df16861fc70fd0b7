"""Which records of a recording are played: what was asked for, resolved by what it holds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from rlstreams.schemas.events import DeadLetter, Prompt, StepCompleted, Trajectory
from rlstreams.streams.log.errors import ConfigError
from rlstreams.streams.log.record import RawRecord
from rlstreams.streams.log.utc import utc_text
from rlstreams.streams.recording import NotRecordedError, Recording
from rlstreams.streams.recording.selection import Range, Selection

ONLY, WITHOUT = "only", "without"


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordFilter:
    """What was asked for beyond a selection; it takes the recording to resolve it."""

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
        rewarded = frozenset(
            (record.event.group_id, record.event.sample)
            for record in recording.events(Trajectory)
            if record.event.reward in record_filter.rewards
        )
        selection = _with_samples(selection, rewarded, "--rewards")
    if record_filter.staleness is not None:
        found = frozenset(
            (ref.group_id, ref.sample)
            for step in _steps(recording)
            for ref in step.samples
            if step.policy_version - 1 - ref.oldest_policy_version in record_filter.staleness
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
    recording: Recording, selection: Selection, since_ms: int | None = None
) -> Iterator[RawRecord]:
    """The records of a selection, in the order of the recording; from a recorded time on."""
    is_all = selection == Selection()
    for raw in recording.records(selection.topics, since_ms=since_ms):
        if is_all or selection.wants(raw, recording.event(raw)):
            yield raw


def moment(recording: Recording, text: str) -> int:
    """Milliseconds since 1970 of `step:7` (when it could begin), `version:5`, `+30`, or a time.

    Raises:
        NotRecordedError: outside the recording; says what is there.
        ConfigError: none of these.
    """
    kind, _, number = text.partition(":")
    span = recording.time_span
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


def _steps(recording: Recording) -> Iterator[StepCompleted]:
    return (record.event for record in recording.events(StepCompleted))


def _groups_of_steps(recording: Recording, steps: Range) -> frozenset[str]:
    by_step = {step.step: {ref.group_id for ref in step.samples} for step in _steps(recording)}
    found = frozenset(g for step, groups in by_step.items() if step in steps for g in groups)
    if not found:
        there = f"steps {min(by_step)} to {max(by_step)}" if by_step else "no completed step"
        raise NotRecordedError(f"none of the steps asked for is recorded: there is {there}")
    return found


def _dead(recording: Recording, which: str) -> frozenset[str]:
    dead = {record.event.group_id for record in recording.events(DeadLetter)}
    if which == ONLY:
        return frozenset(dead)
    prompts = {record.event.group_id for record in recording.events(Prompt)}
    return frozenset(prompts | {r.event.group_id for r in recording.events(Trajectory)}) - dead


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
