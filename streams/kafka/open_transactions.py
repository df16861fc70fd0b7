"""Transactions that stand open in a run's topics, whatever the clocks of hosts say.

The broker tells when a producer wrote last by that producer's own clock. Held against ours alone,
a host whose clock is behind would have a transaction that hangs with every commit. So we look
twice, by our clock, and take for open what was open both times and unchanged. A clock that is ahead
makes a transaction seem younger: it is named that much later.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from kafka import TopicPartition
from kafka.admin import KafkaAdminClient, OffsetSpec

from rlstreams.streams.kafka.admin_ask import NO_OPTIONS, asked
from rlstreams.streams.log.topics import TOPICS

WATCH_S = 2.0  # a commit takes well under a second
_READ_COMMITTED = 1  # `isolation_level` of a ListOffsets request


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenTransaction:
    """A transaction that blocks every reader of its partition."""

    partition: str  # `topic[number]`, with the run's prefix
    producer_id: int
    producer_epoch: int = 0
    first_offset: int
    written_at_ms: int = 0  # its producer's last write there, by the producer's clock
    age_s: float  # since then, by ours
    transactional_id: str = ""  # as the coordinator knows it; empty: it knows none


def open_transactions(
    bootstrap: str,
    run: str,
    options: Mapping[str, str] = NO_OPTIONS,
    *,
    older_than_s: float | None = None,
    watch_s: float = WATCH_S,
) -> tuple[OpenTransaction, ...]:
    """Open transactions in the run's topics, each with whose it is and how long it has stood.

    Args:
        older_than_s: only those that seem to be; None: all.
        watch_s: without those that end, or are added to, within it; spent only where there is one.

    Raises:
        BrokerError: the broker cannot be reached, or refused.
    """
    return asked(
        bootstrap,
        options,
        lambda admin: open_in(admin, run, older_than_s=older_than_s, watch_s=watch_s),
    )


def open_in(
    admin: KafkaAdminClient,
    run: str,
    *,
    older_than_s: float | None = None,
    watch_s: float = WATCH_S,
) -> tuple[OpenTransaction, ...]:
    """See `open_transactions`; looks where the last stable offset lies below the end."""
    every = [
        TopicPartition(topic["name"], part["partition_index"])
        for topic in admin.describe_topics([f"{run}.{topic.name}" for topic in TOPICS])
        for part in topic["partitions"]
    ]
    if not every:
        return ()
    wanted = dict.fromkeys(every, OffsetSpec.LATEST)
    ends = admin.list_partition_offsets(wanted)
    stable = admin.list_partition_offsets(wanted, isolation_level=_READ_COMMITTED)
    held = [p for p in every if stable[p].offset < ends[p].offset]
    found = _idle(admin, held, older_than_s, watch_s) if held else ()
    if not found:
        return ()
    now_ms = time.time() * 1000
    listed = admin.list_transactions()
    ids = {t.producer_id: t.transactional_id for some in listed.values() for t in some}
    return tuple(
        OpenTransaction(
            partition=f"{one.partition.topic}[{one.partition.partition}]",
            producer_id=one.producer_id,
            producer_epoch=one.producer_epoch,
            first_offset=one.first_offset,
            written_at_ms=one.written_at_ms,
            age_s=max(0.0, (now_ms - one.written_at_ms) / 1000),
            transactional_id=ids.get(one.producer_id, ""),
        )
        for one in found
    )


class _Seen(NamedTuple):
    partition: TopicPartition
    producer_id: int
    producer_epoch: int
    first_offset: int
    written_at_ms: int


def _idle(
    admin: KafkaAdminClient,
    partitions: Sequence[TopicPartition],
    older_than_s: float | None,
    watch_s: float,
) -> Sequence[_Seen]:
    """What is open, and was so `watch_s` ago; in order of partitions."""
    latest_ms = float("inf") if older_than_s is None else (time.time() - older_than_s) * 1000
    before = {one for one in _look(admin, partitions) if one.written_at_ms < latest_ms}
    if not before:
        return ()
    time.sleep(watch_s)
    return sorted(before.intersection(_look(admin, sorted({one.partition for one in before}))))


def _look(admin: KafkaAdminClient, partitions: Sequence[TopicPartition]) -> list[_Seen]:
    states: dict[TopicPartition, Any] = admin.describe_producers(list(partitions))
    return [
        _Seen(
            partition,
            producer.producer_id,
            producer.producer_epoch,
            producer.current_transaction_start_offset,
            producer.last_timestamp,
        )
        for partition, state in states.items()
        for producer in state.active_producers
        if producer.current_transaction_start_offset >= 0
    ]
