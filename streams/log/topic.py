"""A topic as a frozen value."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from rlstreams.schemas.events import Event


class Retention(StrEnum):
    """How long a topic keeps records; the periods are configuration."""

    LONG = "long"  # never removed while the run is of interest
    PAYLOAD = "payload"  # by bytes and time
    SHORT = "short"  # by time
    COMPACT = "compact"  # the last record per key, for ever


@dataclass(frozen=True, slots=True, kw_only=True)
class Topic:
    """Name without the run's prefix, what it carries, who writes and reads it."""

    name: str
    events: tuple[type[Event], ...]  # empty: the value is not an event (schema text)
    key: str  # the event's field, or "run"/"fingerprint"
    written_by: tuple[str, ...]
    read_by: tuple[str, ...]
    retention: Retention
    single_partition: bool = True
