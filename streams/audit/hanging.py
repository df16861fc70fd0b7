"""Transactions that hang, as breaches: nothing behind one is read (KIP-664).

A broker aborts a transaction after its timeout. One that stays open longer hangs: its end was
recorded and not written to this partition, and read_committed readers wait there for ever.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rlstreams.streams.audit.report import Breach, BreachKind
from rlstreams.streams.kafka.admin_ask import NO_OPTIONS
from rlstreams.streams.kafka.open_transactions import OpenTransaction, open_transactions
from rlstreams.streams.log.text import utc_text

OVERDUE_S = 35.0  # the timeout of our own, and the time from one look of the broker to the next
WATCH_S = 10.0  # a live worker ends its transaction well within it, or adds to it


def hanging(
    bootstrap: str, run: str, *, options: Mapping[str, str] = NO_OPTIONS
) -> Sequence[Breach]:
    """One breach for each overdue transaction of the run.

    Raises:
        BrokerError: the broker cannot be reached, or refused.
    """
    found = open_transactions(bootstrap, run, options, older_than_s=OVERDUE_S, watch_s=WATCH_S)
    return [breach(one) for one in found]


def breach(one: OpenTransaction) -> Breach:
    """What an open transaction breaks, and how an operator ends it."""
    return Breach(
        kind=BreachKind.HANGING,
        id=one.partition,
        detail=(
            f"nothing is read from offset {one.first_offset} on; "
            f"producer id {one.producer_id}, epoch {one.producer_epoch}, wrote last at "
            f"{utc_text(one.written_at_ms)} UTC, {one.age_s:.0f} s ago. Unless its transactional "
            "id is in CompleteCommit, abort it (kafka-transactions.sh abort)"
        ),
    )
