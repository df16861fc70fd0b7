"""Transactions that hang, as breaches: nothing behind one is read (KIP-664)."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime

from rlstreams.streams.audit.report import Breach, BreachKind
from rlstreams.streams.kafka.admin_ask import NO_OPTIONS
from rlstreams.streams.kafka.open_transactions import IdleTransaction
from rlstreams.streams.kafka.transactions import overdue


def hanging(
    bootstrap: str, run: str, *, options: Mapping[str, str] = NO_OPTIONS
) -> Sequence[Breach]:
    """One breach for each overdue transaction of the run.

    Raises:
        BrokerError: the broker cannot be reached, or refused.
    """
    return [breach(one) for one in overdue(bootstrap, run, options=options)]


def breach(one: IdleTransaction) -> Breach:
    """What an open transaction breaks, and how an operator ends it."""
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
