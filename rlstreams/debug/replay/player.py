"""Writes recorded records into a fresh run, at the speed that is asked for.

Values, keys, headers and partitions are those of the recording; offsets are new, so each record
says in the header `rlstreams-replay-of` where it lay. Positions inside of events stay as they were
recorded: they are part of the bytes that steps hash.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from rlstreams.schemas.tensor import Buffer
from rlstreams.streams.log.bus import Bus, Producer
from rlstreams.streams.log.errors import AbortedError, BrokerError
from rlstreams.streams.log.record import (
    PART,
    REPLAY_HEADER,
    REPLAY_SCOPE_HEADER,
    Outgoing,
    RawRecord,
)

MAX_ABORTS = 5
STREAM_BYTES = 128_000_000  # of one transaction as fast as possible
STREAM_RECORDS = 200_000
LOOK_BYTES = 100_000  # between two looks at the clock
STREAM_S = 2.0  # keys are looked at between transactions
BATCH_BYTES = 32_000_000  # of one transaction at a recorded speed
BATCH_RECORDS = 10_000
TICK_S = 0.02

Seek = Callable[[int, int], Iterable[RawRecord]]


def outgoing_of(
    raw: RawRecord, run: str, value: Sequence[Buffer] | None = None, *, is_part: bool = False
) -> Outgoing:
    """A recorded record, to be sent to where it lay in another run.

    Args:
        raw: as it was recorded.
        run: that it was recorded from; a record that was itself replayed keeps its first origin.
        value: instead of the recorded one, where an event has to be rewritten.
        is_part: more was recorded than is replayed, as always into one role alone.
    """
    topic, partition, offset = raw.position
    origin = {REPLAY_HEADER: f"{run}/{topic}[{partition}]@{offset}".encode()}
    if is_part:
        origin[REPLAY_SCOPE_HEADER] = PART
    return Outgoing(
        topic=topic,
        key=raw.key,
        value=(raw.value,) if value is None else value,
        headers={**origin, **raw.headers},
        partition=partition,
    )


@dataclass(slots=True)
class Pace:
    """What the user says while it plays; read between transactions."""

    speed: float = 1.0  # recorded seconds per second; inf: as fast as possible
    is_paused: bool = False
    is_ended: bool = False
    num_single: int = 0  # records to let through although it is paused
    to_next_step: bool = False  # let records through up to the next StepCompleted
    go_to_ms: int | None = None  # recorded time to go on from, earlier or later

    @property
    def is_free(self) -> bool:
        """Whether records go as fast as they can."""
        return self.speed == float("inf") and not self.is_paused

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


class Player:
    """Plays records into one run; owned by one thread.

    Args:
        bus: of the fresh run.
        run: that was recorded.
        pace: shared with who reads the keyboard.
        is_part: not all that was recorded is played; so it is after a leap forward, too.
        in_order: each record is committed before one of another partition follows.
        seek: records to go on with, given the recorded times (milliseconds) of where it is and of
            where it shall be; None: `pace.go_to_ms` is left alone.
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
        is_part: bool = False,
        in_order: bool = False,
        seek: Seek | None = None,
        is_step: Callable[[RawRecord], bool] = lambda _: False,
        on_progress: Callable[[Played], None] = lambda _: None,
        now_s: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._bus = bus
        self._run = run
        self.pace = pace
        self._is_part = is_part
        self._in_order = in_order
        self._seek = seek
        self._is_step = is_step
        self._on_progress = on_progress
        self._now_s = now_s
        self._sleep = sleep
        self._started_s = now_s()
        self._num_records = self._num_bytes = self._at_ms = 0
        self._by_topic: Counter[str] = Counter()
        self._left: Iterator[RawRecord] = iter(())
        self._next: RawRecord | None = None  # whose turn has not come
        # Recorded time that is to be reached now: advances with the clock, at `speed`.
        self._clock_ms: float | None = None
        self._ticked_s = now_s()

    def play(self, records: Iterable[RawRecord]) -> Played:
        """All of them, or until `pace.is_ended`.

        Raises:
            BrokerError: transactions were aborted again and again.
        """
        self._left = iter(records)
        with self._bus.producer("replay") as producer:
            while not self.pace.is_ended and self._peek() is not None:
                if self.pace.is_free and not self._in_order:
                    self._stream(producer)
                else:
                    self._send(producer, self._batch())
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

    def _peek(self) -> RawRecord | None:
        """The next record, after a seek if one was asked for; None at the end."""
        if self._seek is not None and self.pace.go_to_ms is not None:
            to_ms, self.pace.go_to_ms = self.pace.go_to_ms, None
            self._is_part = self._is_part or to_ms > self._at_ms
            self._left = iter(self._seek(self._at_ms, to_ms))
            self._next, self._clock_ms, self._at_ms = None, None, to_ms
            self._on_progress(self.played)
        if self._next is None:
            self._next = next(self._left, None)
        return self._next

    def _stream(self, producer: Producer) -> None:
        """One transaction, which is written while the records are read."""
        taken: list[Outgoing] = []

        def flow() -> Iterator[Outgoing]:
            num_bytes, look_at, until_s = 0, 0, self._now_s() + STREAM_S
            while (raw := self._next or next(self._left, None)) is not None:
                self._next = None
                taken.append(outgoing_of(raw, self._run, is_part=self._is_part))
                self._count(raw)
                yield taken[-1]
                num_bytes += len(raw.value)
                if num_bytes >= STREAM_BYTES or len(taken) >= STREAM_RECORDS:
                    return
                if num_bytes >= look_at:
                    look_at = num_bytes + LOOK_BYTES
                    if self._now_s() >= until_s:
                        return

        _insist(lambda attempt: producer.commit_stream(taken if attempt else flow()))
        self._clock_ms = float(self._at_ms)
        self._on_progress(self.played)

    def _batch(self) -> list[Outgoing]:
        """What is due now; if nothing is, it waits a moment."""
        batch: list[Outgoing] = []
        num_bytes, partition = 0, None
        while (raw := self._peek()) is not None and not self.pace.is_ended:
            is_other = self._in_order and batch and raw.partition != partition
            if is_other or num_bytes >= BATCH_BYTES or len(batch) >= BATCH_RECORDS:
                break
            wait_s = self._wait_s(raw)
            if wait_s > 0:
                if not batch:
                    self._sleep(wait_s)
                break
            batch.append(outgoing_of(raw, self._run, is_part=self._is_part))
            num_bytes, partition, self._next = num_bytes + len(raw.value), raw.partition, None
            self._count(raw)
            self._step_on(raw)
        return batch

    def _wait_s(self, raw: RawRecord) -> float:
        """Seconds until it is the record's turn, at most a moment; 0: it is."""
        self._tick()
        if self._clock_ms is None:
            self._clock_ms = float(raw.timestamp_ms)
        if not self.pace.lets_through:
            return TICK_S
        ahead_ms = raw.timestamp_ms - self._clock_ms
        if self.pace.is_paused or self.pace.speed == float("inf") or ahead_ms <= 0:
            self._clock_ms = max(self._clock_ms, float(raw.timestamp_ms))
            return 0.0
        return min(TICK_S, ahead_ms / 1000 / self.pace.speed)

    def _tick(self) -> None:
        now_s = self._now_s()
        is_running = not self.pace.is_paused and self.pace.speed != float("inf")
        if self._clock_ms is not None and is_running:
            self._clock_ms += (now_s - self._ticked_s) * 1000 * self.pace.speed
        self._ticked_s = now_s

    def _count(self, raw: RawRecord) -> None:
        self._at_ms = raw.timestamp_ms
        self._num_records += 1
        self._num_bytes += len(raw.value)
        self._by_topic[raw.position.topic] += 1

    def _step_on(self, raw: RawRecord) -> None:
        if self.pace.is_paused:
            self.pace.num_single = max(0, self.pace.num_single - 1)
            if self.pace.to_next_step and self._is_step(raw):
                self.pace.to_next_step = False

    def _send(self, producer: Producer, batch: list[Outgoing]) -> None:
        if batch:
            commit(producer, batch)
            self._on_progress(self.played)


def commit(producer: Producer, records: list[Outgoing]) -> None:
    """One transaction; an aborted one is sent again as it is.

    Raises:
        BrokerError: aborted again and again.
    """
    _insist(lambda _: producer.commit(records))


def _insist(send: Callable[[int], object]) -> None:
    """Call `send` with the number of the attempt until it is not aborted."""
    for attempt in range(MAX_ABORTS):
        try:
            send(attempt)
        except AbortedError as err:
            if attempt + 1 == MAX_ABORTS:
                raise BrokerError(
                    f"{MAX_ABORTS} transactions in a row were aborted: {err}"
                ) from err
        else:
            return
