"""Events to outgoing records, records to events."""

from __future__ import annotations

import time
from collections.abc import Mapping

from rlstreams.schemas import DecodeError, UnknownEventError, decode, encode
from rlstreams.schemas.binary import NO_TEXTS, SchemaTexts
from rlstreams.schemas.events import (
    ControlState,
    DeviceLease,
    Event,
    Prompt,
    ScoredTrajectory,
    Trajectory,
)
from rlstreams.schemas.operations import CONTROL_STATES, LEASE_STATES
from rlstreams.streams.log.group_ids import sample_name
from rlstreams.streams.log.record import (
    ID_HEADER,
    PART_HEADER,
    PURPOSE_HEADER,
    Outgoing,
    RawRecord,
    Record,
)
from rlstreams.streams.log.topics import Topic

_ORDERS = {ControlState: CONTROL_STATES, DeviceLease: LEASE_STATES}  # words that each must have


def outgoing(topic: Topic, event: Event, *, partition: int | None = None) -> Outgoing:
    """Return `event` as a record of `topic`, with its key and headers.

    Raises:
        TypeError: the topic does not carry this kind of event.
    """
    if not isinstance(event, topic.events):
        raise TypeError(f"topic {topic.name} does not carry {type(event).__name__}")
    subject = event.trajectory if isinstance(event, ScoredTrajectory) else event
    return Outgoing(
        topic=topic.name,
        key=topic.key_of(subject).encode(),
        value=encode(event),
        headers=_headers(subject),
        partition=partition,
    )


def _headers(subject: Event) -> Mapping[str, bytes]:
    """Return the headers of a sample's event: its id and purpose; none for other events."""
    if isinstance(subject, Trajectory):
        attempt = subject.attempt
    elif isinstance(subject, Prompt):
        attempt = 0
    else:
        return {}
    return {
        ID_HEADER: f"{sample_name(subject)}/{attempt}".encode(),
        PURPOSE_HEADER: subject.purpose.encode(),
    }


def decoded(raw: RawRecord, schemas: SchemaTexts = NO_TEXTS) -> Record[Event]:
    """Decode a record's event.

    Args:
        schemas: schemas of the log that it was read from (`Bus.schemas`, `RunLog.schemas`).

    Raises:
        schemas.DecodeError: not one of our events, or parts of it never came; the caller
            dead-letters `raw`. Also an order with a word that this release does not know.
    """
    part = raw.headers.get(PART_HEADER)
    if part is not None and not part.endswith(b"/1"):
        raise DecodeError(f"parts are missing: of this record only {part!r} came")
    event = decode(raw.value, schemas)
    if isinstance(event, ControlState | DeviceLease):
        known = _ORDERS[type(event)]
        if event.state not in known:
            raise UnknownEventError(
                f"{type(event).__name__}.state must be one of {known}, got {event.state!r}; "
                "a newer rlstreams may have written it"
            )
    return Record(event=event, raw=raw)


def now_ms() -> int:
    """Return wall-clock ms since the epoch: for events; durations use the monotonic clock."""
    return time.time_ns() // 1_000_000


class SteadyClock:
    """Unix time in ms that no step of the clock affects: the time at the start, plus time since.

    It serves comparisons of times in a live log; `now_ms` is for events.
    """

    def __init__(self) -> None:
        self._ahead_s = time.time() - time.monotonic()

    def __call__(self) -> int:
        """Return the time, ms."""
        return round(1000 * (self._ahead_s + time.monotonic()))
