"""A reader of given partitions from given offsets: no group, no commits."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from rlstreams.streams.kafka.feed import KafkaFeed
from rlstreams.streams.log.bus import Closing
from rlstreams.streams.log.errors import StreamsError
from rlstreams.streams.log.parts import Assembler
from rlstreams.streams.log.record import Partition, RawRecord

# A seek takes effect some time later; until then the client answers with its old position.
_SEEK_S = 1.0


class KafkaReader(Closing):
    """The port `Reader` on Kafka."""

    def __init__(
        self,
        feed: KafkaFeed,
        offsets: Mapping[Partition, int] | None,
        on_read: Callable[[Sequence[RawRecord]], None] = lambda _: None,
    ) -> None:
        self._feed = feed
        self._on_read = on_read
        self._starts: dict[Partition, int] = {}
        self._old: dict[Partition, int] = {}  # the client's positions before the last seek
        self._old_until_s = 0.0
        self._error: StreamsError | None = None
        self._closed = False
        if offsets:
            self.seek(offsets)

    def poll(self, max_records: int, timeout_s: float) -> Sequence[RawRecord]:
        """See `Reader`.

        Raises:
            OffsetGoneError: the offset is outside the log; names the range that is there. Raised
                by every poll until `seek`; records read before it are returned first.
            BrokerError: the broker refused, or has been unreachable for too long.
        """
        deadline = time.monotonic() + timeout_s
        found: list[RawRecord] = []
        while len(found) < max_records and self._error is None:
            wait_s = 0.0 if found else deadline - time.monotonic()
            fetched, self._error = self._feed.fetch(max_records - len(found), wait_s)
            for message in fetched:
                self._old.pop(message.partition, None)
                if message.partition not in self._starts:
                    continue
                if (record := self._feed.assembler.add(message)) is not None:
                    found.append(record)
            if not fetched and not found:
                found += self._feed.torn(self._feed.reached(self._starts))
            if not fetched and (found or time.monotonic() >= deadline):
                break
        if self._error is not None and not found:
            raise self._error
        self._on_read(found)
        return found

    def seek(self, offsets: Mapping[Partition, int]) -> None:
        """Read exactly these partitions from these offsets on."""
        self._old = self._feed.reached(dict.fromkeys(offsets, -1))
        self._old_until_s = time.monotonic() + _SEEK_S
        # assign(), not the client's seek(): only it revives a partition whose offset was gone.
        self._feed.consumer.assign([self._feed.theirs(p, at) for p, at in offsets.items()])
        self._feed.assembler = Assembler()
        self._starts = dict(offsets)
        self._error = None

    def positions(self) -> Mapping[Partition, int]:
        """Return the next offset to deliver by partition; it skips markers and aborted records."""
        if not self._starts:
            return {}
        found = self._feed.delivered(self._starts)
        if not self._old:
            return found
        if time.monotonic() >= self._old_until_s:
            self._old = {}
        is_old = {p for p, at in self._old.items() if found.get(p) == at}
        return {p: self._starts[p] if p in is_old else at for p, at in found.items()}

    def close(self) -> None:
        """Release the connections; idempotent."""
        if not self._closed:
            self._closed = True
            self._feed.consumer.close()
