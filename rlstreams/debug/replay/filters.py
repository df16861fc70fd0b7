"""Records of a recording that steps need: the steps themselves, and all of their groups."""

from __future__ import annotations

import math
from collections.abc import Iterator

from rlstreams.schemas.events import StepCompleted
from rlstreams.streams.log.errors import ConfigError
from rlstreams.streams.log.record import RawRecord
from rlstreams.streams.recording import NotRecordedError, Recording
from rlstreams.streams.recording.selection import Range, Selection


def range_of(text: str) -> Range | None:
    """`3:7`, `3:`, `:7` or `3`; None: all steps.

    Raises:
        ConfigError: anything else.
    """
    if not text:
        return None
    first, colon, last = text.partition(":")
    try:
        low = int(first) if first else 1
        high = int(last) if last else math.inf if colon else low
    except ValueError:
        raise ConfigError(f"--steps must be A:B, A: or :B, got {text!r}") from None
    if low > high:
        raise ConfigError(f"--steps: {text} is empty, because {first} is above {last}")
    return Range(first=low, last=high)


def selection_of(recording: Recording, steps: Range | None) -> Selection:
    """The steps with their groups; None: everything.

    Raises:
        NotRecordedError: the recording has none of them.
    """
    if steps is None:
        return Selection()
    known = [record.event for record in recording.events(StepCompleted)]
    wanted = [event for event in known if event.step in steps]
    if not wanted:
        numbers = [event.step for event in known]
        there = f"steps {min(numbers)} to {max(numbers)}" if known else "no completed step"
        raise NotRecordedError(f"none of the steps asked for is recorded: there is {there}")
    return Selection(
        steps=steps, groups=frozenset(ref.group_id for one in wanted for ref in one.samples)
    )


def chosen(recording: Recording, selection: Selection) -> Iterator[RawRecord]:
    """The records of a selection, in the order of the recording."""
    is_all = selection == Selection()
    for raw in recording.records(selection.topics):
        if is_all or selection.wants(raw, recording.event(raw)):
            yield raw
