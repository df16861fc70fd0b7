"""Transactions open beyond their timeout, which block all readers. Uses kafka-python.

A broker aborts a transaction after its timeout. One that stays open longer hangs: its end was
recorded but not written to this partition (kafka.apache.org, KIP-664), and read_committed readers
wait there forever.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime

from kafka import TopicPartition
from kafka.admin import KafkaAdminClient

from streams.audit.report import Breach, BreachKind
from streams.kafka.admin_ask import NO_OPTIONS, asked
from streams.kafka.open_transactions import IdleTransaction, idle_transactions
from streams.topics import TOPICS

TIMEOUT_S = 30.0  # of our own transactions
MARGIN_S = 5.0  # the broker looks for overdue ones from time to time
WATCH_S = 10.0  # a live worker ends its transaction well within it, or adds to it


def hanging(
    bootstrap: str,
    run: str,
    *,
    older_than_s: float = TIMEOUT_S + MARGIN_S,
    watch_s: float = WATCH_S,
    options: Mapping[str, str] = NO_OPTIONS,
) -> Sequence[Breach]:
    """One breach for each open transaction of the run that nothing was added to for so long.

    Args:
        older_than_s: since its last write, by the producer's clock against ours.
        watch_s: and by ours alone; spent only where there is such a one.

    Raises:
        BrokerError: the broker cannot be reached, or refused.
    """

    def ask(admin: KafkaAdminClient) -> Sequence[IdleTransaction]:
        partitions = [
            TopicPartition(topic["name"], partition["partition_index"])
            for topic in admin.describe_topics([f"{run}.{topic.name}" for topic in TOPICS])
            for partition in topic["partitions"]
        ]
        return idle_transactions(admin, partitions, older_than_s=older_than_s, watch_s=watch_s)

    return [_breach(one) for one in asked(bootstrap, options, ask)]


def _breach(one: IdleTransaction) -> Breach:
    partition = one.partition
    since = datetime.fromtimestamp(one.written_at_ms / 1000, UTC)
    age_s = one.age_s(time.time() * 1000)
    return Breach(
        kind=BreachKind.HANGING,
        id=f"{partition.topic}[{partition.partition}]",
        detail=(
            f"nothing is read from offset {one.first_offset} on; "
            f"producer id {one.producer_id}, epoch {one.producer_epoch}, wrote last at "
            f"{since:%Y-%m-%d %H:%M:%S} UTC, {age_s:.0f} s ago. Unless its transactional id is "
            "in CompleteCommit, abort it (kafka-transactions.sh abort)"
        ),
    )
