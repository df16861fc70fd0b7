"""Transactions open beyond their timeout, which block all readers. Uses kafka-python.

A broker aborts a transaction after its timeout. One that stays open longer hangs: its end was
recorded but not written to this partition (kafka.apache.org, KIP-664), and read_committed readers
wait there forever.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kafka import TopicPartition
from kafka.admin import KafkaAdminClient

from rlstreams.streams.kafka.admin_ask import NO_OPTIONS, asked
from rlstreams.streams.kafka.open_transactions import IdleTransaction, idle_transactions
from rlstreams.streams.log.topics import TOPICS

TIMEOUT_S = 30.0  # of our own transactions
MARGIN_S = 5.0  # the broker looks for overdue ones from time to time
WATCH_S = 10.0  # a live worker ends its transaction well within it, or adds to it


def overdue(
    bootstrap: str,
    run: str,
    *,
    older_than_s: float = TIMEOUT_S + MARGIN_S,
    watch_s: float = WATCH_S,
    options: Mapping[str, str] = NO_OPTIONS,
) -> Sequence[IdleTransaction]:
    """The open transactions of the run that nothing was added to for so long.

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

    return asked(bootstrap, options, ask)
