"""A member of a KIP-848 group: assignments change during a poll and are reported after it."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

from confluent_kafka import KafkaException

from rlstreams.streams.kafka.errors import NOT_YET_KNOWN, broker_error, error_of, until
from rlstreams.streams.kafka.feed import KafkaFeed
from rlstreams.streams.kafka.positions import PositionsAsked, committed_at
from rlstreams.streams.log.bus import Closing, Polled
from rlstreams.streams.log.errors import AbortedError, BrokerError
from rlstreams.streams.log.parts import Message
from rlstreams.streams.log.record import Committed, Partition, RawRecord

_HELD_MESSAGES = 16  # fetched by polls for no records, before the partitions are paused
UNSERVED_S = 30.0  # longest wait for `lost` to follow: several heartbeats at any interval


class KafkaGroupConsumer(Closing):
    """The port `GroupConsumer` on Kafka.

    Args:
        make_feed: messages of a new consumer that is not subscribed yet.
        topics: as the client names them.
        stable_s: longest time for which a predecessor's transaction may hold up committed offsets.
        max_poll_s: time without a poll after which the client leaves the group.
    """

    def __init__(
        self,
        make_feed: Callable[[], KafkaFeed],
        topics: Sequence[str],
        *,
        stable_s: float,
        max_poll_s: float,
    ) -> None:
        self._make_feed = make_feed
        self._feed = make_feed()
        self._topics = list(topics)
        self._stable_s = stable_s
        self._max_poll_s = max_poll_s
        self._polled_at_s = time.monotonic()
        self._starts: dict[Partition, int] = {}  # of the partitions that are ours
        self._asked: list[PositionsAsked] = []  # of partitions that are not fetched yet
        self._unserved: dict[Partition, float] = {}  # given without a position: monotonic time
        self._paused: frozenset[Partition] = frozenset()  # no records of these are delivered
        self._stopped: set[Partition] = set()  # paused in the client, after a message of theirs
        self._held: deque[Message] = deque()
        self._hushed = False
        self._error: BaseException | None = None
        self._before_revoked: Callable[[Set[Partition]], None] | None = None
        self._when_beyond: Callable[[Partition, int], Committed] | None = None
        self._closed = False
        self._has_joined = False  # the first poll joins
        self._begin_poll()

    def _join(self) -> None:
        self._client.subscribe(
            self._topics,
            on_assign=self._on_assign,
            on_revoke=self._on_revoke,
            on_lost=self._on_lost,
        )
        self._has_joined = True

    @property
    def _client(self) -> Any:  # noqa: ANN401
        return self._feed.consumer

    def _begin_poll(self) -> None:
        self._records: list[RawRecord] = []
        self._num_bytes = 0  # of their values
        self._assigned: dict[Partition, Committed] = {}
        self._revoked: set[Partition] = set()

    def poll(self, max_records: int, timeout_s: float, *, max_bytes: int | None = None) -> Polled:
        """See `GroupConsumer`.

        Raises:
            OffsetGoneError: the group's position is outside the log.
            TopicMismatchError: a topic is gone.
            BrokerError: the broker refused, or has been unreachable for too long.
        """
        self._polled_at_s = time.monotonic()
        deadline = self._polled_at_s + timeout_s
        self._begin_poll()
        if not self._has_joined:
            self._join()
        self._start()
        if max_records > 0:
            self._take(max_records, deadline, max_bytes or sys.maxsize)
        else:
            self._idle(deadline)
        self._raise_stored()
        self._check_served()
        return Polled(
            records=tuple(self._records),
            assigned=dict(self._assigned),
            revoked=frozenset(self._revoked),
        )

    def _take(self, max_records: int, deadline: float, max_bytes: int) -> None:
        if self._hushed:
            self._hushed = False
            self._resume(self._stopped - self._paused)
        self._release(max_records)
        while len(self._records) < max_records and self._num_bytes < max_bytes:
            wait_s = 0.0 if self._has_news() else deadline - time.monotonic()
            messages, error = self._feed.fetch(max_records - len(self._records), wait_s)
            self._error = self._error or error
            for message in messages:
                self._deliver(message)
            if not messages and not self._has_news():
                # An incomplete record holds back `positions()`, which would never pass its bound.
                self._records += self._feed.torn(self._feed.read(self._starts, self._held))
            if not messages and (self._has_news() or time.monotonic() >= deadline):
                return

    def _has_news(self) -> bool:
        return bool(self._records or self._assigned or self._revoked or self._error)

    def _deliver(self, message: Message) -> None:
        if message.partition not in self._starts:
            return  # revoked since it was fetched
        if message.partition in self._paused:
            self._hold(message)
        elif (record := self._feed.assembler.add(message)) is not None:
            self._records.append(record)
            self._num_bytes += len(record.value)

    def _hold(self, message: Message) -> None:
        """Keep a message for later, and stop fetching its partition while that is paused.

        A partition is paused in the client only here, where its fetching is under way: a pause or a
        resume beside an assignment can stop a partition for ever (librdkafka issue 5591).
        """
        self._held.append(message)
        if self._hushed or message.partition in self._paused:
            self._stop({message.partition})

    def _release(self, max_records: int) -> None:
        """Deliver held messages, except from paused partitions."""
        held, self._held = self._held, deque()
        for message in held:
            if len(self._records) < max_records:
                self._deliver(message)
            else:
                self._held.append(message)

    def _idle(self, deadline: float) -> None:
        """Serve the membership; a few messages may come and are held."""
        while True:
            if len(self._held) >= _HELD_MESSAGES and not self._hushed:
                self._hushed = True
                self._stop({message.partition for message in self._held})
            messages, error = self._feed.fetch(1, deadline - time.monotonic())
            self._error = self._error or error
            for message in messages:
                if message.partition in self._starts:
                    self._hold(message)
            if self._has_news() or time.monotonic() >= deadline:
                return

    def positions(self) -> Mapping[Partition, int]:
        """Return, for each assigned partition, the offset up to which everything was delivered."""
        return self._feed.delivered(self._starts, self._held) if self._starts else {}

    def pause(self, partitions: frozenset[Partition]) -> None:
        """Deliver nothing from exactly these until called again; keeps the membership."""
        self._paused = partitions
        if not self._hushed:
            self._resume(self._stopped - partitions)

    def _stop(self, partitions: Set[Partition]) -> None:
        if new := partitions - self._stopped:
            self._client.pause([self._feed.theirs(partition) for partition in new])
            self._stopped |= new

    def _resume(self, partitions: Set[Partition]) -> None:
        if partitions:
            self._client.resume([self._feed.theirs(partition) for partition in partitions])
            self._stopped -= partitions

    def leave(self) -> Set[Partition]:
        """See `GroupConsumer`. A new client joins: one that unsubscribed may still be leaving."""
        gone = frozenset(self._starts)
        self._begin_poll()
        self._announce(gone)
        self._revoked |= gone  # and are announced no second time while the client closes
        self._client.close()
        self._forget(gone)
        self._asked, self._unserved, self._stopped = [], {}, set()
        self._hushed, self._has_joined, self._error = False, False, None
        self._feed = self._make_feed()
        return gone

    def when_beyond(self, call: Callable[[Partition, int], Committed]) -> None:
        """See `GroupConsumer`."""
        self._when_beyond = call

    def before_revoked(self, call: Callable[[Set[Partition]], None]) -> None:
        """See `GroupConsumer`."""
        self._before_revoked = call

    def check_owns(self, partitions: Set[Partition]) -> None:
        """Check that these partitions are ours as of the last poll, and that the poll is recent.

        The broker checks member and epoch, never the owner of a partition; and it takes
        positions from a client that left for want of polls as an administrator's, if the group is
        empty.

        Raises:
            AbortedError: a partition is not ours, or we may have left the group.
        """
        foreign = sorted(str(partition) for partition in partitions - self._starts.keys())
        if foreign:
            raise AbortedError(f"positions of partitions that are not ours: {', '.join(foreign)}")
        silent_s = time.monotonic() - self._polled_at_s
        if silent_s >= self._max_poll_s:
            raise AbortedError(
                f"positions of a member that has not polled for {silent_s:.1f} s; "
                f"after {self._max_poll_s:g} s it leaves its group"
            )

    def group_metadata(self) -> Any:  # noqa: ANN401
        """Return member and epoch, for a transaction that has just begun."""
        return self._client.consumer_group_metadata()

    # An exception inside a callback would reach us as a SystemError without its cause.

    def _on_assign(self, _client: object, tps: list[Any]) -> None:
        if self._closed:
            return  # the broker would not answer a request any more
        try:
            self._take_over(tps)
        except Exception as err:  # noqa: BLE001  (raised after the poll)
            self._error = self._error or err

    def _take_over(self, tps: list[Any]) -> None:
        """Take partitions; each is fetched once its position is known.

        To the group they are ours from here on, so `_on_lost` gives back those alone that the
        client fetches: it refuses the others, and would wait for a right answer for ever.
        """
        self._client.incremental_assign([])
        if tps:
            self._asked.append(PositionsAsked(self._feed, tps, self._stable_s))
            self._start()

    def _start(self) -> None:
        """Start the partitions whose positions are known by now."""
        for asked in tuple(self._asked):
            answer = asked.answer()
            if answer is None:
                continue
            self._asked.remove(asked)
            found = {self._feed.ours(tp): self._start_of(tp) for tp in answer}
            now_s = time.monotonic()
            self._unserved |= {p: now_s for p in asked.wanted if p not in found}
            self._client.incremental_assign(
                [self._feed.theirs(partition, at.offset) for partition, at in found.items()]
            )
            self._assigned |= found
            self._starts |= {partition: at.offset for partition, at in found.items()}

    def _start_of(self, tp: Any) -> Committed:  # noqa: ANN401
        """Return the start: the group's position; by the log, if it is none or past the end."""
        at, partition = committed_at(tp), self._feed.ours(tp)
        if at is None:
            return Committed(offset=self._range(partition)[0])
        if self._when_beyond is None or at.offset <= self._range(partition)[1]:
            return at
        return self._when_beyond(partition, at.offset)

    def _range(self, partition: Partition) -> tuple[int, int]:
        deadline = time.monotonic() + self._stable_s
        doing = f"asking for beginning and end of {partition}"
        ask = lambda: self._feed.range(partition)  # noqa: E731
        return until(deadline, ask, doing, self._feed.bootstrap, NOT_YET_KNOWN)

    def _on_revoke(self, client: object, tps: list[Any]) -> None:
        """Let the role commit the revoked partitions' positions; their next member waits for us.

        A member that the group has dropped cannot commit by mistake: it keeps its old epoch, which
        the broker refuses, until it joins anew after this.
        """
        try:
            self._announce({self._feed.ours(tp) for tp in tps})
        except Exception as err:  # noqa: BLE001  (raised after the poll)
            self._error = self._error or err
        self._on_lost(client, tps)

    def _announce(self, gone: Set[Partition]) -> None:
        """Call `before_revoked`, but not for partitions that this poll assigned or revoked before.

        The role's positions of those are old.
        """
        leaving = (gone & self._starts.keys()) - self._assigned.keys() - self._revoked
        if leaving and self._before_revoked is not None and not self._closed:
            self._before_revoked(leaving)

    def _on_lost(self, _client: object, tps: list[Any]) -> None:
        gone = {self._feed.ours(tp) for tp in tps}
        self._resume(self._stopped & gone)  # the client would keep them paused if they come back
        fetched = [self._feed.theirs(partition) for partition in gone & self._starts.keys()]
        for asked in self._asked:
            asked.wanted -= gone
        self._forget(gone)
        try:
            self._client.incremental_unassign(fetched)
        except KafkaException as err:
            self._error = self._error or err

    def _forget(self, gone: Set[Partition]) -> None:
        for partition in gone:
            self._starts.pop(partition, None)
            self._unserved.pop(partition, None)
            self._assigned.pop(partition, None)
            self._feed.assembler.forget(partition)
        self._revoked |= gone
        self._records = [r for r in self._records if r.partition not in gone]
        self._held = deque(held for held in self._held if held.partition not in gone)

    def _check_served(self) -> None:
        """Check that the group took back the partitions that it gave us without a position.

        A group that came back with its broker may know this member after all: then it never revokes
        the partitions, they stay ours, and nobody reads them.

        Raises:
            BrokerError: the group did not; a restarted process is another member.
        """
        if not self._unserved:
            return
        silent_s = time.monotonic() - min(self._unserved.values())
        if silent_s >= UNSERVED_S:
            names = ", ".join(sorted(str(partition) for partition in self._unserved))
            raise BrokerError(
                f"Kafka at {self._feed.bootstrap}: the group gave us {names} {silent_s:.0f} s ago, "
                "said that it does not know us when asked for the positions, and has not taken "
                "them back; restart this process, it joins as a new member"
            )

    def _raise_stored(self) -> None:
        if self._error is None:
            return
        error, self._error = self._error, None
        if isinstance(error, KafkaException):
            raise broker_error(error_of(error), "joining", self._feed.bootstrap) from error
        raise error

    def close(self) -> None:
        """Leave the group; its other members get the partitions at once."""
        if not self._closed:
            self._closed = True
            self._client.close()
