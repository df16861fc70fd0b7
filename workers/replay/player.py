"""Writes recorded records into a fresh run, at the speed that is asked for.

Values, keys, headers and partitions are those of the recording; offsets are new, so each record
says in the header `rlstreams-replay-of` where it lay. Positions inside of events stay as they were
recorded: they are part of the bytes that steps hash.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from schemas.tensor import Buffer
from streams.bus import Bus, Producer
from streams.errors import AbortedError, BrokerError
from streams.record import Outgoing, RawRecord

REPLAY_HEADER = "rlstreams-replay-of"
MAX_ABORTS = 5
BATCH_BYTES = 32_000_000  # of one transaction as fast as possible
BATCH_RECORDS = 10_000
TICK_S = 0.02  # of one transaction at a recorded speed


def outgoing_of(raw: RawRecord, run: str, value: Sequence[Buffer] | None = None) -> Outgoing:
    """A recorded record, to be sent to where it lay in another run.

    Args:
        raw: as it was recorded.
        run: that it was recorded from; a record that was itself replayed keeps its first origin.
        value: instead of the recorded one, where an event has to be rewritten.
    """
    headers = dict(raw.headers)
    headers.setdefault(REPLAY_HEADER, f"{run}/{raw.position}".encode())
    return Outgoing(
        topic=raw.position.topic,
        key=raw.key,
        value=[raw.value] if value is None else value,
        headers=headers,
        partition=raw.position.partition,
    )


@dataclass(slots=True)
class Pace:
    """What the user says while it plays; read between transactions."""

    speed: float = 1.0  # recorded seconds per second; inf: as fast as possible
    is_paused: bool = False
    is_ended: bool = False
    num_single: int = 0  # records to let through although it is paused
    to_next_step: bool = False  # let records through up to the next StepCompleted

    @property
    def lets_through(self) -> bool:
        """Whether the next record may go."""
        return not self.is_paused or self.num_single > 0 or self.to_next_step


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """How far it is."""

    num_records: int
    num_bytes: int
    at_ms: int  # recorded time of the last record
    seconds: float
    by_topic: Mapping[str, int]


@dataclass(slots=True)
class _Batch:
    records: list[Outgoing] = field(default_factory=list)
    num_bytes: int = 0
    partition: object = None


class Player:
    """Plays records into one run; owned by one thread.

    Args:
        bus: of the fresh run.
        run: that was recorded.
        pace: shared with who reads the keyboard.
        in_order: each record is committed before one of another partition follows.
        is_step: whether a record ends a step, for `Pace.to_next_step`.
        on_progress: called after each transaction.
        now_s, sleep: the clock.
    """

    def __init__(
        self,
        bus: Bus,
        run: str,
        pace: Pace,
        *,
        in_order: bool = False,
        is_step: Callable[[RawRecord], bool] = lambda _: False,
        on_progress: Callable[[Played], None] = lambda _: None,
        now_s: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._bus = bus
        self._run = run
        self.pace = pace
        self._in_order = in_order
        self._is_step = is_step
        self._on_progress = on_progress
        self._now_s = now_s
        self._sleep = sleep
        self._started_s = now_s()
        self._num_records = self._num_bytes = self._at_ms = 0
        self._by_topic: dict[str, int] = {}
        # Recorded time that is to be reached now: advances with the clock, at `speed`.
        self._clock_ms: float | None = None
        self._ticked_s = now_s()

    def play(self, records: Iterable[RawRecord]) -> Played:
        """All of them, or until `pace.is_ended`.

        Raises:
            BrokerError: transactions were aborted again and again.
        """
        batch = _Batch()
        with self._bus.producer("replay") as producer:
            for raw in records:
                if self._must_send(batch, raw):
                    self._send(producer, batch)
                if not self._await(raw, producer, batch):
                    break
                self._add(batch, raw)
            self._send(producer, batch)
        return self.played

    @property
    def played(self) -> Played:
        """How far it is."""
        return Played(
            num_records=self._num_records,
            num_bytes=self._num_bytes,
            at_ms=self._at_ms,
            seconds=self._now_s() - self._started_s,
            by_topic=dict(self._by_topic),
        )

    def _must_send(self, batch: _Batch, raw: RawRecord) -> bool:
        if not batch.records:
            return False
        is_other = self._in_order and batch.partition != raw.partition
        return is_other or batch.num_bytes >= BATCH_BYTES or len(batch.records) >= BATCH_RECORDS

    def _await(self, raw: RawRecord, producer: Producer, batch: _Batch) -> bool:
        """Until it is the record's turn; what waits is sent first. False: the user ended it."""
        while not self.pace.is_ended:
            self._tick()
            if self._clock_ms is None:
                self._clock_ms = float(raw.timestamp_ms)
            if not self.pace.lets_through:
                self._send(producer, batch)
                self._sleep(TICK_S)
                continue
            is_single = self.pace.is_paused
            ahead_ms = raw.timestamp_ms - self._clock_ms
            if is_single or self.pace.speed == float("inf") or ahead_ms <= 0:
                self._clock_ms = max(self._clock_ms, float(raw.timestamp_ms))
                return True
            self._send(producer, batch)
            self._sleep(min(TICK_S, max(0.0, ahead_ms / 1000 / self.pace.speed)))
        return False

    def _tick(self) -> None:
        now_s = self._now_s()
        if (
            self._clock_ms is not None
            and not self.pace.is_paused
            and self.pace.speed != float("inf")
        ):
            self._clock_ms += (now_s - self._ticked_s) * 1000 * self.pace.speed
        self._ticked_s = now_s

    def _add(self, batch: _Batch, raw: RawRecord) -> None:
        batch.records.append(outgoing_of(raw, self._run))
        batch.num_bytes += len(raw.value)
        batch.partition = raw.partition
        self._at_ms = raw.timestamp_ms
        self._num_records += 1
        self._num_bytes += len(raw.value)
        topic = raw.position.topic
        self._by_topic[topic] = self._by_topic.get(topic, 0) + 1
        if self.pace.is_paused:
            self.pace.num_single = max(0, self.pace.num_single - 1)
            if self.pace.to_next_step and self._is_step(raw):
                self.pace.to_next_step = False

    def _send(self, producer: Producer, batch: _Batch) -> None:
        if not batch.records:
            return
        commit(producer, batch.records)
        batch.records, batch.num_bytes = [], 0
        self._on_progress(self.played)


def commit(producer: Producer, records: list[Outgoing]) -> None:
    """One transaction; an aborted one is sent again as it is.

    Raises:
        BrokerError: aborted again and again.
    """
    for attempt in range(MAX_ABORTS):
        try:
            producer.commit(records)
        except AbortedError as err:
            if attempt + 1 == MAX_ABORTS:
                raise BrokerError(
                    f"{MAX_ABORTS} transactions in a row were aborted: {err}"
                ) from err
        else:
            return
