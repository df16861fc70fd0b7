"""Events to outgoing records, records to events."""

from __future__ import annotations

import time
from collections.abc import Mapping

from schemas import DecodeError, decode, encode
from schemas.events import Event, Prompt, ScoredTrajectory, Trajectory
from streams.record import ID_HEADER, PART_HEADER, PURPOSE_HEADER, Outgoing, RawRecord, Record
from streams.topic import Topic


def outgoing(topic: Topic, event: Event, *, partition: int | None = None) -> Outgoing:
    """`event` as a record of `topic`, with its key and headers.

    Raises:
        TypeError: the topic does not carry this kind of event.
    """
    if not isinstance(event, topic.events):
        raise TypeError(f"topic {topic.name} does not carry {type(event).__name__}")
    return Outgoing(
        topic=topic.name,
        key=str(getattr(_subject(event), topic.key)).encode(),
        value=encode(event),
        headers=_headers(event),
        partition=partition,
    )


def _subject(event: Event) -> Event:
    """What the event is about: a score is about its trajectory."""
    return event.trajectory if isinstance(event, ScoredTrajectory) else event


def _headers(event: Event) -> Mapping[str, bytes]:
    sample = _subject(event)
    if not isinstance(sample, Prompt | Trajectory):
        return {}
    attempt = 0 if isinstance(sample, Prompt) else sample.attempt
    return {
        ID_HEADER: f"{sample.group_id}/{sample.sample}/{attempt}".encode(),
        PURPOSE_HEADER: sample.purpose.encode(),
    }


def decoded(raw: RawRecord, schemas: Mapping[bytes, str] | None = None) -> Record[Event]:
    """The record with its event.

    Raises:
        schemas.DecodeError: not one of our events, or parts of it never came; the caller
            dead-letters `raw`.
    """
    part = raw.headers.get(PART_HEADER)
    if part is not None and not part.endswith(b"/1"):
        raise DecodeError(f"parts are missing: of this record only {part!r} came")
    return Record(event=decode(raw.value, schemas), raw=raw)


def now_ms() -> int:
    """Wall clock, milliseconds since the epoch: for events; durations use the monotonic clock."""
    return time.time_ns() // 1_000_000
