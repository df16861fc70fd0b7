"""The trainer's samples: held in memory up to a bound, read again from the log beyond it."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from rlstreams.schemas import SchemaTexts
from rlstreams.schemas.events import ScoredTrajectory
from rlstreams.streams.log.bus import Bus
from rlstreams.streams.log.codec import decoded
from rlstreams.streams.log.record import Position, RawRecord
from rlstreams.workers.trainer.intake.fetch import RecordGoneError, fetch


@dataclass(frozen=True, slots=True, kw_only=True)
class Payload:
    """A sample's record, raw and decoded."""

    raw: RawRecord
    scored: ScoredTrajectory


class Payloads:
    """Payloads by position.

    Args:
        while_waiting: see `fetch`.
        limit_bytes: of all payloads held.
    """

    def __init__(
        self, bus: Bus, while_waiting: Callable[[int], None], limit_bytes: int = sys.maxsize
    ) -> None:
        self._bus = bus
        self._while_waiting = while_waiting
        self.limit_bytes = limit_bytes
        self._held: dict[Position, Payload] = {}
        self._num_bytes = 0

    def put(self, payload: Payload) -> None:
        """Hold a payload if there is room; else `take` reads it again."""
        position, size = payload.raw.position, len(payload.raw.value)
        if position not in self._held and self._num_bytes + size <= self.limit_bytes:
            self._held[position] = payload
            self._num_bytes += size

    def release(self, positions: Iterable[Position]) -> None:
        """Release the payloads at these positions."""
        for position in positions:
            if payload := self._held.pop(position, None):
                self._num_bytes -= len(payload.raw.value)

    def take(self, positions: Sequence[Position]) -> list[Payload]:
        """The payloads at `positions`, in order; they are no longer held.

        Raises:
            OffsetGoneError, RecordGoneError, TimeoutError: see `fetch`.
        """
        found = {position: self._held[position] for position in positions if position in self._held}
        self.release(found)
        missing = [position for position in positions if position not in found]
        if missing:
            raws = fetch(self._bus, missing, while_waiting=self._while_waiting)
            found |= {raw.position: payload_of(raw, self._bus.schemas()) for raw in raws}
        return [found[position] for position in positions]


def payload_of(raw: RawRecord, schemas: SchemaTexts) -> Payload:
    """Decode a record of scored-trajectories.

    Args:
        schemas: of the bus that the record was read from.

    Raises:
        DecodeError: not one of our events.
        RecordGoneError: another kind of event lies there.
    """
    event = decoded(raw, schemas).event
    if not isinstance(event, ScoredTrajectory):
        raise RecordGoneError(f"{raw.position} holds a {type(event).__name__}")
    return Payload(raw=raw, scored=event)


def batch_hash(payloads: Sequence[Payload]) -> str:
    """SHA-256 over the records' bytes in batch order, each preceded by its length (8 bytes)."""
    digest = hashlib.sha256()
    for payload in payloads:
        digest.update(len(payload.raw.value).to_bytes(8, "little"))
        digest.update(payload.raw.value)
    return digest.hexdigest()
