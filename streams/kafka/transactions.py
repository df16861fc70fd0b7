"""Transactions open beyond their timeout, which block all readers. Uses kafka-python.

A broker aborts a transaction after its timeout. One that stays open longer hangs: its end was
recorded but not written to this partition (kafka.apache.org, KIP-664), and read_committed readers
wait there forever.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from kafka import TopicPartition
from kafka.admin import KafkaAdminClient

from streams.audit.report import Breach, BreachKind
from streams.kafka.admin_ask import NO_OPTIONS, asked
from streams.topics import TOPICS

TIMEOUT_S = 30.0  # of our own transactions
MARGIN_S = 5.0  # the broker looks for overdue ones from time to time


def hanging(
    bootstrap: str,
    run: str,
    *,
    older_than_s: float = TIMEOUT_S + MARGIN_S,
    options: Mapping[str, str] = NO_OPTIONS,
) -> Sequence[Breach]:
    """One breach for each open transaction of the run that nothing was added to for so long.

    Raises:
        BrokerError: the broker cannot be reached, or refused.
    """

    def ask(admin: KafkaAdminClient) -> Mapping[TopicPartition, Any]:
        partitions = [
            TopicPartition(topic["name"], partition["partition_index"])
            for topic in admin.describe_topics([f"{run}.{topic.name}" for topic in TOPICS])
            for partition in topic["partitions"]
        ]
        answer: Mapping[TopicPartition, Any] = admin.describe_producers(partitions)
        return answer

    states = asked(bootstrap, options, ask)
    now_ms = time.time() * 1000
    found: list[Breach] = []
    for partition, state in sorted(states.items()):
        for producer in state.active_producers:
            if producer.current_transaction_start_offset < 0:
                continue
            age_s = (now_ms - producer.last_timestamp) / 1000
            if age_s > older_than_s:
                found.append(_breach(partition, producer, age_s))
    return found


def _breach(partition: TopicPartition, producer: Any, age_s: float) -> Breach:  # noqa: ANN401
    since = datetime.fromtimestamp(producer.last_timestamp / 1000, UTC)
    return Breach(
        kind=BreachKind.HANGING,
        id=f"{partition.topic}[{partition.partition}]",
        detail=(
            f"nothing is read from offset {producer.current_transaction_start_offset} on; "
            f"producer id {producer.producer_id}, epoch {producer.producer_epoch}, wrote last at "
            f"{since:%Y-%m-%d %H:%M:%S} UTC, {age_s:.0f} s ago. Unless its transactional id is "
            "in CompleteCommit, abort it (kafka-transactions.sh abort)"
        ),
    )
