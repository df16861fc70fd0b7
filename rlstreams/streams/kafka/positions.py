"""Asks for the positions of partitions between the polls of their member.

A predecessor that died in a commit holds up the answer until its transaction has ended. The member
goes on with its other partitions meanwhile, so each request is short.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from confluent_kafka import KafkaError, KafkaException

from rlstreams.streams.kafka.errors import NOISE, broker_error, error_of
from rlstreams.streams.kafka.feed import ASK_S, KafkaFeed
from rlstreams.streams.log.done_set import UNREADABLE
from rlstreams.streams.log.record import Committed

# The group expelled us between its assignment and our request; `lost` follows.
_EXPELLED = frozenset({KafkaError.UNKNOWN_MEMBER_ID, KafkaError.FENCED_MEMBER_EPOCH})
# A heartbeat raised our epoch, and its answer is on its way; the client repeats the request too.
_NOT_YET = NOISE | {KafkaError.STALE_MEMBER_EPOCH}
# An answer takes milliseconds, and a request that must wait takes all of its time. A broker that is
# far or busy gets longer requests, each twice as long as the one before.
FIRST_S, LONGEST_S = 0.1, 0.8
_PAUSE = 4  # the member polls for so many times the time that the last request took
_LEAST_S = 0.05  # from a refusal to the next request


class PositionsAsked:
    """The positions of partitions that the group gave to this member at once.

    Args:
        tps: as the client names them.
        stable_s: after which a request that is not answered is an error.
    """

    def __init__(self, feed: KafkaFeed, tps: Sequence[Any], stable_s: float) -> None:
        self.wanted = {feed.ours(tp) for tp in tps}  # less those that went to another member since
        self._feed = feed
        self._tps = list(tps)
        self._deadline = time.monotonic() + stable_s
        self._next_s = 0.0
        self._limit_s = FIRST_S

    def answer(self) -> Sequence[Any] | None:
        """Ask, if it is time to; return the positions of `wanted`, none if the group does not know
        this member. None: no answer yet.

        Raises:
            BrokerError: the broker refused, or an open transaction stood until the deadline.
        """
        if not self.wanted:
            return ()
        if time.monotonic() < self._next_s:
            return None
        began_s = time.monotonic()
        try:
            found = stable(self._feed.consumer, self._tps, self._limit_s)
        except KafkaException as err:
            error = error_of(err)
            if error.code() in _EXPELLED:
                return ()
            now_s = time.monotonic()
            if error.code() not in _NOT_YET or now_s >= self._deadline:
                names = ", ".join(str(self._feed.ours(tp)) for tp in self._tps)
                doing = f"asking for the committed offsets of {names}"
                raise broker_error(error, doing, self._feed.bootstrap) from err
            took_s = now_s - began_s
            self._next_s = now_s + max(_LEAST_S, _PAUSE * took_s)
            if took_s >= self._limit_s:
                self._limit_s = min(2 * self._limit_s, LONGEST_S)
            return None
        return [tp for tp in found if self._feed.ours(tp) in self.wanted]


def stable(client: Any, tps: Sequence[Any], timeout_s: float = ASK_S) -> Sequence[Any]:  # noqa: ANN401
    """Return the group's offsets; wait for pending ones, for the client reads read_committed.

    Raises:
        KafkaException: also for an error in a single partition's answer.
    """
    found: Sequence[Any] = client.committed(list(tps), timeout=timeout_s)
    for tp in found:
        if tp.error is not None:
            raise KafkaException(tp.error)
    return found


def committed_at(tp: Any) -> Committed | None:  # noqa: ANN401
    """Return the client's answer as `Committed`; None without a commit."""
    if tp.offset < 0:
        return None
    # confluent-kafka writes a NUL after its metadata, which other clients see; after theirs, it
    # reads on to the next NUL, whatever lies there.
    try:
        metadata = (tp.metadata or "").rstrip("\0")
    except UnicodeDecodeError:
        metadata = UNREADABLE
    return Committed(offset=tp.offset, metadata=metadata)
