"""The trainer's samples: held in memory up to a bound, read again from the log beyond it."""

from __future__ import annotations

import hashlib
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
    """A sample's record and what it says."""

    raw: RawRecord
    scored: ScoredTrajectory


class Payloads:
    """Payloads by position.

    Args:
        while_waiting: see `fetch`.
    """

    def __init__(self, bus: Bus, while_waiting: Callable[[int], None]) -> None:
        self._bus = bus
        self._while_waiting = while_waiting
        self._held: dict[Position, Payload] = {}

    def put(self, payload: Payload) -> None:
        """Hold it."""
        self._held[payload.raw.position] = payload

    def release(self, positions: Iterable[Position]) -> None:
        """Let go of these; `take` reads them again."""
        for position in positions:
            self._held.pop(position, None)

    def take(self, positions: Sequence[Position]) -> list[Payload]:
        """The payloads at `positions`, in order; they are no longer held.

        Raises:
            OffsetGoneError, RecordGoneError, TimeoutError: see `fetch`.
        """
        missing = [position for position in positions if position not in self._held]
        if missing:
            raws = fetch(self._bus, missing, while_waiting=self._while_waiting)
            for raw in raws:
                self.put(payload_of(raw, self._bus.schemas()))
        return [self._held.pop(position) for position in positions]


def payload_of(raw: RawRecord, schemas: SchemaTexts) -> Payload:
    """Decode a record of scored-trajectories.

    Args:
        schemas: of the bus that it was read from.

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
