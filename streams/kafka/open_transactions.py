"""Transactions that stand open and are not added to, whatever the clocks of hosts say.

The broker tells when a producer wrote last by that producer's own clock. Held against ours alone,
a host whose clock is behind would have a transaction that hangs with every commit. So we look
twice, by our clock, and take for open what was open both times and unchanged. A clock that is ahead
makes a transaction seem younger: it is named that much later.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from kafka import TopicPartition
from kafka.admin import KafkaAdminClient


class IdleTransaction(NamedTuple):
    """An open transaction in a partition, as it was left by its producer's last write there."""

    partition: TopicPartition
    producer_id: int
    producer_epoch: int
    first_offset: int
    written_at_ms: int  # by the producer's clock

    def age_s(self, now_ms: float) -> float:
        """Since the last write, if its clock and ours agree."""
        return (now_ms - self.written_at_ms) / 1000


def idle_transactions(
    admin: KafkaAdminClient,
    partitions: Sequence[TopicPartition],
    *,
    older_than_s: float | None = None,
    watch_s: float,
) -> Sequence[IdleTransaction]:
    """What is open, and was so `watch_s` ago; in order of partitions.

    Args:
        older_than_s: only those that seem to be; None: all. Without any we do not look twice.
    """
    now_ms = time.time() * 1000
    before = {
        one
        for one in _look(admin, partitions)
        if older_than_s is None or one.age_s(now_ms) > older_than_s
    }
    if not before:
        return []
    time.sleep(watch_s)
    again = _look(admin, sorted({one.partition for one in before}))
    return sorted(before.intersection(again))


def _look(admin: KafkaAdminClient, partitions: Sequence[TopicPartition]) -> list[IdleTransaction]:
    states: dict[TopicPartition, Any] = admin.describe_producers(list(partitions))
    return [
        IdleTransaction(
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
