"""What the trainer reads: scored trajectories and dead letters, into the planner.

It reads with `assign` and seek, never a group: where to go on after a restart is in `steps`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from schemas import DecodeError
from schemas.events import DeadLetter, PartitionPosition, ScoredTrajectory
from streams.bus import Bus
from streams.codec import decoded
from streams.record import Partition, RawRecord
from streams.topics import DEAD_LETTERS, SCORED
from workers.context import Context
from workers.dead_letters import dead_letter
from workers.trainer.admission import Admission
from workers.trainer.groups import DeadSample, SeenSample
from workers.trainer.payloads import Payload, Payloads
from workers.trainer.validation import validate

MAX_POLL = 256


class Intake:
    """Feeds `Admission` and `Payloads`; collects dead letters of what cannot be trained on."""

    def __init__(
        self,
        context: Context,
        bus: Bus,
        admission: Admission,
        payloads: Payloads,
        *,
        vocab_size: int,
        start: tuple[PartitionPosition, ...],
    ) -> None:
        self._context = context
        self._admission = admission
        self._payloads = payloads
        self._vocab_size = vocab_size
        self._limit_bytes = context.config.trainer.buffer_mb * 1_000_000
        self._reader = bus.reader(_start_offsets(bus, start))
        self.letters: list[DeadLetter] = []
        self.num_samples = 0

    def poll(self, timeout_s: float) -> None:
        """Read what is there."""
        now_s = time.monotonic()
        for raw in self._reader.poll(MAX_POLL, timeout_s):
            if raw.position.topic == SCORED.name:
                self._sample(raw, now_s)
            else:
                self._dead(raw, now_s)
        self._payloads.release(self._admission.let_go(self._limit_bytes))

    def positions(self) -> Mapping[Partition, int]:
        """Next offsets to read."""
        return self._reader.positions()

    def close(self) -> None:
        """Release the reader."""
        self._reader.close()

    def _sample(self, raw: RawRecord, now_s: float) -> None:
        scored: ScoredTrajectory | None = None
        try:
            event = decoded(raw).event
            if not isinstance(event, ScoredTrajectory):
                raise ValueError(f"a {type(event).__name__} lies in {raw.position}")  # noqa: TRY004, TRY301
            scored = event
            seen = SeenSample.of(scored, raw.position, len(raw.value))
            validate(scored, self._vocab_size)
            if self._admission.add(seen, now_s):
                self._payloads.put(Payload(raw=raw, scored=scored))
                self.num_samples += 1
        except ValueError as err:
            self._bury(raw, scored, err, now_s)

    def _bury(
        self, raw: RawRecord, scored: ScoredTrajectory | None, err: ValueError, now_s: float
    ) -> None:
        letter = dead_letter(
            self._context,
            raw,
            scored.trajectory if scored else None,
            reason="decode" if isinstance(err, DecodeError) else "validation",
            detail=str(err),
            permanent=scored is None,
        )
        # A closed group's poison was buried before, by us or by a predecessor.
        if not letter.group_id or self._admission.dead(DeadSample.of(letter, raw.position), now_s):
            self.letters.append(letter)

    def _dead(self, raw: RawRecord, now_s: float) -> None:
        try:
            event = decoded(raw).event
        except DecodeError:
            return  # a foreign writer's; it names no sample of ours, and stays where it is
        if isinstance(event, DeadLetter):
            self._admission.dead(DeadSample.of(event, raw.position), now_s)


def _start_offsets(bus: Bus, start: tuple[PartitionPosition, ...]) -> dict[Partition, int]:
    offsets = {**bus.beginnings(SCORED.name), **bus.beginnings(DEAD_LETTERS.name)}
    for position in start:
        offsets[Partition(position.topic, position.partition)] = position.offset
    return offsets
