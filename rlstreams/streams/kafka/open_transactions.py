"""Transactions that stand open in a run's topics, whatever the hosts' clocks.

The broker reports a producer's last write by that producer's own clock. By our clock alone, every
commit of a host whose clock is behind would look like a hanging transaction. So we look twice, by
our clock, and report transactions that were open both times and unchanged. A clock that is ahead
makes a transaction seem younger: it is reported that much later.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from rlstreams.streams.kafka.bus import KafkaBus

if TYPE_CHECKING:
    from kafka import TopicPartition
    from kafka.admin import KafkaAdminClient

WATCH_S = 2.0  # a commit takes well under a second


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class OpenTransaction:
    """A transaction that blocks every reader of its partition."""

    partition: str  # `topic[number]`, with the run's prefix
    producer_id: int
    producer_epoch: int = 0
    first_offset: int
    written_at_ms: int = 0  # its producer's last write there, by the producer's clock
    transactional_id: str = ""  # of its coordinator; "": the coordinator knows none

    @property
    def age_s(self) -> float:
        """Seconds since its producer's last write, by our clock."""
        return max(0.0, time.time() - self.written_at_ms / 1000)


def open_transactions(
    bootstrap: str,
    run: str,
    options: Mapping[str, str] = MappingProxyType({}),
    *,
    older_than_s: float | None = None,
    watch_s: float = WATCH_S,
) -> tuple[OpenTransaction, ...]:
    """Return open transactions in the run's topics, each with its producer and its last write.

    Args:
        older_than_s: only transactions that seem older; None: all.
        watch_s: time within which a transaction that ends, or grows, is left out; it is waited for
            only if there is one.

    Raises:
        BrokerError: the broker cannot be reached, or refused.
    """
    with KafkaBus(bootstrap, run, options=options) as bus:
        held = bus.held()
    if not held:
        return ()
    from kafka import TopicPartition  # 0.2 s; the other client has no such request

    from rlstreams.streams.kafka.admin_ask import asked

    partitions = [TopicPartition(tp.topic, tp.partition) for tp in held]
    ask = partial(open_in, held=partitions, older_than_s=older_than_s, watch_s=watch_s)
    return asked(bootstrap, options, ask)


def standing(
    bootstrap: str,
    prefix: str,
    options: Mapping[str, str],
    *,
    older_than_s: float,
) -> tuple[str, ...]:
    """Return transactional ids of this prefix whose open transaction is older than `older_than_s`.

    The age is by the clock of the coordinating broker. The request needs rights to these ids alone.

    Raises:
        BrokerError: the broker cannot be reached, or refused.
    """
    from kafka.admin import TransactionState

    from rlstreams.streams.kafka.admin_ask import asked

    listed = asked(
        bootstrap,
        options,
        lambda admin: admin.list_transactions(
            # The client would send an enumeration member's full name, which is no state's name.
            state_filters=[TransactionState.ONGOING.value],
            duration_filter_ms=1000 * older_than_s,
        ),
    )
    ids = {one.transactional_id for some in listed.values() for one in some}
    return tuple(sorted(name for name in ids if name.startswith(prefix)))


def open_in(
    admin: KafkaAdminClient,
    held: Sequence[TopicPartition],
    *,
    older_than_s: float | None = None,
    watch_s: float = WATCH_S,
) -> tuple[OpenTransaction, ...]:
    """See `open_transactions`; `held`: partitions with records beyond the last stable offset."""
    latest_ms = float("inf") if older_than_s is None else (time.time() - older_than_s) * 1000
    before = {one for one in _look(admin, held) if one.written_at_ms < latest_ms}
    if not before:
        return ()
    time.sleep(watch_s)
    found = sorted(_look(admin, held).intersection(before))
    listed = admin.list_transactions() if found else {}
    ids = {t.producer_id: t.transactional_id for some in listed.values() for t in some}
    return tuple(replace(one, transactional_id=ids.get(one.producer_id, "")) for one in found)


def _look(admin: KafkaAdminClient, partitions: Sequence[TopicPartition]) -> set[OpenTransaction]:
    states: dict[TopicPartition, Any] = admin.describe_producers(list(partitions))
    return {
        OpenTransaction(
            partition=f"{partition.topic}[{partition.partition}]",
            producer_id=producer.producer_id,
            producer_epoch=producer.producer_epoch,
            first_offset=producer.current_transaction_start_offset,
            written_at_ms=producer.last_timestamp,
        )
        for partition, state in states.items()
        for producer in state.active_producers
        if producer.current_transaction_start_offset >= 0
    }
