"""The reading ports of `MemoryBus`: positions per partition over a shared log."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence, Set

from rlstreams.streams.log.bus import Closing, Polled
from rlstreams.streams.log.errors import AbortedError
from rlstreams.streams.log.parts import Assembler
from rlstreams.streams.log.record import Committed, Partition, RawRecord
from tests.memory.log import MemoryLog, named


class _Feed:
    """Reads partitions in turn, joins parts, knows where it is."""

    def __init__(self, log: MemoryLog, run: str) -> None:
        self._log = log
        self._run = run
        self._assembler = Assembler()
        self.next: dict[Partition, int] = {}
        self._turn = 0

    def theirs(self, partition: Partition) -> Partition:
        return named(self._run, partition)

    def stop(self, partition: Partition) -> None:
        self.next.pop(partition, None)
        self._assembler.forget(partition)

    def take(
        self, max_records: int, paused: frozenset[Partition], max_bytes: int = sys.maxsize
    ) -> list[RawRecord]:
        """Records of one partition after the other; the next call begins with the next one."""
        records: list[RawRecord] = []
        order = sorted(self.next.keys() - paused)
        self._turn += 1
        for index in range(len(order)):
            partition = order[(self._turn + index) % len(order)]
            room = max_bytes - sum(len(record.value) for record in records)
            records += self._take_from(partition, max_records - len(records), room)
        return records

    def _take_from(self, partition: Partition, max_records: int, max_bytes: int) -> list[RawRecord]:
        records: list[RawRecord] = []
        while len(records) < max_records and max_bytes > 0:
            message, self.next[partition] = self._log.read(
                self.theirs(partition), self.next[partition]
            )
            if message is None:
                return records + self._torn(partition, max_records - len(records))
            record = self._assembler.add(message._replace(partition=partition))
            if record is not None:
                records.append(record)
                max_bytes -= len(record.value)
        return records

    def _torn(self, partition: Partition, max_records: int) -> list[RawRecord]:
        """At the last stable offset what is not whole never will be."""
        keys = [key for key in self._assembler.incomplete() if key.partition == partition]
        return [self._assembler.give_up(key) for key in keys[:max_records]]

    def has_more(self, paused: frozenset[Partition]) -> bool:
        ready = (self._log.read(self.theirs(p), self.next[p])[0] for p in self.next.keys() - paused)
        return any(message is not None for message in ready)

    def positions(self) -> dict[Partition, int]:
        positions = {}
        for partition, offset in self.next.items():
            message, after = self._log.read(self.theirs(partition), offset)
            here = after if message is None else message.offset
            first = self._assembler.first_offset(partition)
            positions[partition] = here if first is None else min(here, first)
        return positions


class MemoryGroupConsumer(Closing):
    """The port `GroupConsumer`."""

    def __init__(
        self, log: MemoryLog, run: str, group: str, partitions: Iterable[Partition]
    ) -> None:
        self.group = group
        self._log = log
        self._feed = _Feed(log, run)
        self._all = tuple(partitions)
        self._paused: frozenset[Partition] = frozenset()
        self._before_revoked: Callable[[Set[Partition]], None] | None = None
        self._when_beyond: Callable[[Partition, int], Committed] | None = None
        self._closed = False
        self._member_id = 0  # until the first poll

    def _join(self) -> int:
        with self._log.changed:
            self._log.changed.notify_all()
            return self._log.group(self.group).join(self._all)

    def poll(self, max_records: int, timeout_s: float, *, max_bytes: int | None = None) -> Polled:
        """See `GroupConsumer`."""
        deadline = time.monotonic() + timeout_s
        while True:
            with self._log.changed:
                if not self._member_id:
                    self._member_id = self._join()
                revoked, assigned = self._rebalance()
                records = self._feed.take(max_records, self._paused, max_bytes or sys.maxsize)
            if records or revoked or assigned or time.monotonic() >= deadline:
                return Polled(records=tuple(records), assigned=assigned, revoked=revoked)
            self._log.wait_until(lambda: self._has_news(max_records), deadline)

    def _has_news(self, max_records: int) -> bool:
        group = self._log.group(self.group)
        if self._member_id not in group.members:
            return True
        changes = group.revocations(self._member_id) or self._grants()
        return bool(changes or (max_records and self._feed.has_more(self._paused)))

    def _grants(self) -> list[Partition]:
        """A partition whose position is pending is given only once that is settled."""
        grants = self._log.group(self.group).grants(self._member_id)
        return [p for p in grants if self._log.is_stable(self.group, self._feed.theirs(p))]

    def _rebalance(self) -> tuple[frozenset[Partition], dict[Partition, Committed]]:
        group = self._log.group(self.group)
        lost: frozenset[Partition] = frozenset()
        if self._member_id not in group.members:  # expelled: all is lost, join anew
            lost = frozenset(self._feed.next)
            self._member_id = self._join()
        member = group.members[self._member_id]
        leaving = group.revocations(self._member_id)
        if leaving and self._before_revoked is not None:
            self._before_revoked(leaving)
        revoked = lost | leaving
        for partition in revoked:
            member.owned.discard(partition)
            self._feed.stop(partition)
        assigned = {partition: self._start_of(partition) for partition in self._grants()}
        for partition, at in assigned.items():
            member.owned.add(partition)
            self._feed.next[partition] = at.offset
        if revoked or assigned:
            self._log.changed.notify_all()
        return revoked, assigned

    def _start_of(self, partition: Partition) -> Committed:
        theirs = self._feed.theirs(partition)
        begin = self._log.range(theirs)[0]
        at = self._log.group(self.group).committed.get(theirs, Committed(offset=begin))
        if self._when_beyond is not None and at.offset > self._log.range(theirs)[1]:
            return self._when_beyond(partition, at.offset)
        return at

    def positions(self) -> Mapping[Partition, int]:
        """See `GroupConsumer`."""
        return self._feed.positions()

    def leave(self) -> Set[Partition]:
        """See `GroupConsumer`."""
        gone = frozenset(self._feed.next)
        if gone and self._before_revoked is not None:
            self._before_revoked(gone)
        self.expel()
        for partition in gone:
            self._feed.stop(partition)
        self._member_id = 0
        return gone

    def when_beyond(self, call: Callable[[Partition, int], Committed]) -> None:
        """See `GroupConsumer`."""
        self._when_beyond = call

    def pause(self, partitions: frozenset[Partition]) -> None:
        """See `GroupConsumer`."""
        self._paused = partitions

    def before_revoked(self, call: Callable[[Set[Partition]], None]) -> None:
        """See `GroupConsumer`."""
        self._before_revoked = call

    def owns(self, partition: Partition) -> bool:
        """Whether it is ours as of the last poll."""
        return partition in self._feed.next

    def expel(self) -> None:
        """Let the group drop this member without telling it, as a missed session does."""
        with self._log.changed:
            self._log.group(self.group).members.pop(self._member_id, None)
            self._log.changed.notify_all()

    def check_alive(self) -> None:
        """Whether the group still knows this member.

        Raises:
            AbortedError: it was expelled, its partitions may be another's.
        """
        if self._member_id not in self._log.group(self.group).members:
            raise AbortedError(f"member {self._member_id} is not in group {self.group} any more")

    def close(self) -> None:
        """Leave the group; idempotent."""
        if not self._closed:
            self._closed = True
            self.expel()


class MemoryReader(Closing):
    """The port `Reader`."""

    def __init__(self, log: MemoryLog, run: str, offsets: Mapping[Partition, int] | None) -> None:
        self._log = log
        self._run = run
        self._closed = False
        self.seek(offsets or {})

    def poll(self, max_records: int, timeout_s: float) -> Sequence[RawRecord]:
        """See `Reader`."""
        if self._closed:
            raise RuntimeError("Reader closed")
        deadline = time.monotonic() + timeout_s
        none: frozenset[Partition] = frozenset()
        while True:
            records = self._feed.take(max_records, none)
            if records or time.monotonic() >= deadline:
                return records
            self._log.wait_until(lambda: self._feed.has_more(none), deadline)

    def seek(self, offsets: Mapping[Partition, int]) -> None:
        """See `Reader`."""
        self._feed = _Feed(self._log, self._run)
        self._feed.next = dict(offsets)

    def positions(self) -> Mapping[Partition, int]:
        """See `Reader`."""
        return self._feed.positions()

    def close(self) -> None:
        """Release nothing; no poll comes after it."""
        self._closed = True
