"""The number of a worker that joins: the log decides who has it.

A joiner reads which workers are there, takes the lowest free number from `JOINED_FROM` on, and
writes so. The order of records decides between two that chose the same: the fold of workers gives
a name to its first claim (`streams.workers`), and the other joiner takes the next.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from itertools import count

from rlstreams.schemas.events import NO_VERSION, Event, WorkerReport
from rlstreams.streams.log.bus import Bus
from rlstreams.streams.log.codec import now_ms, outgoing
from rlstreams.streams.log.errors import ConfigError
from rlstreams.streams.log.record import Partition, Record
from rlstreams.streams.log.rights import OfRole
from rlstreams.streams.log.topic_plan import SHARED
from rlstreams.streams.log.topics import WORKER_EVENTS
from rlstreams.streams.workers import JOIN_S, JOINED_FROM, JOINING, SILENT_S, Workers
from rlstreams.workers.loop.foreign import EventReader
from rlstreams.workers.loop.host import host_name, release

SEAT_S = 60.0  # a dead writer's transaction may hide the newest records for half of it
# Reports that far back are read, an hour of it for a clock of ours that is ahead of the others': a
# broker takes no more. A worker that is there writes one a second, or within `JOIN_S`.
_BACK_MS = round(1000 * JOIN_S) + 3_600_000
_PARTITION = Partition(WORKER_EVENTS.name, 0)


class WorkersThere:
    """The workers that are there, as far as `worker-events` was read: a fold of its end."""

    def __init__(self, bus: Bus) -> None:
        self.workers = Workers()
        self._bus = bus
        start, _ = bus.written_since(_PARTITION, now_ms() - _BACK_MS)
        self._reader = EventReader(bus, {_PARTITION: start}, "workers")

    def catch_up(self, end: int | None = None) -> None:
        """Read to this offset; None: all that there is now.

        Raises:
            DeadlineError: `worker-events` stopped delivering.
        """
        end = self._bus.ends(WORKER_EVENTS.name)[_PARTITION] if end is None else end
        self._apply(self._reader.up_to({_PARTITION: end}, SEAT_S))

    def poll(self, timeout_s: float) -> None:
        """Read what is new."""
        self._apply(self._reader.poll(1000, timeout_s))

    def _apply(self, records: Iterable[Record[Event]]) -> None:
        for record in records:
            self.workers.apply(record.event)

    def close(self) -> None:
        """Release the reader."""
        self._reader.close()


class Seats:
    """Numbers of one role."""

    def __init__(self, bus: Bus, role: str) -> None:
        self._bus = OfRole(bus, role)
        self._role = role
        self._there = WorkersThere(self._bus)
        self._workers = self._there.workers

    def take(self, instance: str, ordinal: int | None = None) -> int:
        """A number of this role for this process.

        Args:
            ordinal: the one that is wanted; None: the lowest that is free.

        Raises:
            ConfigError: another process has it, or there are as many workers as partitions.
            DeadlineError: `worker-events` stopped delivering.
        """
        self._there.catch_up()
        self._refuse_idle()
        if ordinal is not None:
            self._await_silence(f"{self._role}-{ordinal}")
        for number in count(JOINED_FROM) if ordinal is None else (ordinal,):
            worker = f"{self._role}-{number}"
            is_held = self._workers.is_taken if ordinal is not None else self._may_live
            if not is_held(worker) and self._claim(worker, instance):
                return number
        raise ConfigError(f"--ordinal {ordinal}: {self._why_taken(f'{self._role}-{ordinal}')}")

    def close(self) -> None:
        """Release the reader."""
        self._there.close()

    def _may_live(self, worker: str) -> bool:
        """Whether a process had this name that did not report its stop, within `JOIN_S`.

        A shorter silence is no death: a worker that takes over partitions waits, and does not
        report, for an open transaction of their last owner; who took its name would fence it.
        """
        named = self._workers.by_name.get(worker)
        if named is None or not named.lives:
            return False
        last = named.newest
        age_ms = self._workers.clock_ms - last.heard_ms
        return last.state != "stopped" and age_ms <= 1000 * JOIN_S

    def _claim(self, worker: str, instance: str) -> bool:
        """Whether our claim is the first by the log's order."""
        report = WorkerReport(
            worker=worker,
            role=self._role,
            instance=instance,
            state=JOINING,
            detail="",
            policy_version=NO_VERSION,
            at_ms=now_ms(),
            host=host_name(),
            release=release(),
        )
        with self._bus.appender() as appender:
            place = appender.append(outgoing(WORKER_EVENTS, report)).result(SEAT_S)
        self._there.catch_up(place.offset + 1)
        return self._workers.by_name[worker].newest.instance == instance

    def _refuse_idle(self) -> None:
        """Refuse more members of a group than partitions: one would never get any work."""
        if (topic := SHARED.get(self._role)) is None:
            return
        total, there = self._bus.partitions(topic.name), self._workers.present(self._role)
        if len(there) >= total:
            raise ConfigError(
                f"{topic.name} has {total} partitions and the run has {len(there)} {self._role} "
                "workers: another one would get none; partitions of a run never change, and "
                "broker.headroom says how many the next one has"
            )

    def _await_silence(self, worker: str) -> None:
        """Wait until a killed predecessor is silent, after `SILENT_S`; one that reports lives."""
        until_s = time.monotonic() + SILENT_S + 2.0
        while self._workers.is_taken(worker) and time.monotonic() < until_s:
            self._there.poll(0.05)

    def _why_taken(self, worker: str) -> str:
        life = self._workers.by_name[worker].newest
        return (
            f"{worker} is there, instance {life.instance[:8]} on host {life.host or '?'}: leave "
            "--ordinal out, and a free number is taken; or end that one first"
        )


def take_seat(bus: Bus, role: str, instance: str, ordinal: int | None) -> int:
    """`Seats.take`, once."""
    seats = Seats(bus, role)
    try:
        return seats.take(instance, ordinal)
    finally:
        seats.close()
