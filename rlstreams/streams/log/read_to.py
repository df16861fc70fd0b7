"""Reading up to given ends; a partition that stops delivering raises an error that names it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence

from rlstreams.streams.log.bus import Reader
from rlstreams.streams.log.errors import DeadlineError
from rlstreams.streams.log.record import Partition, RawRecord

DELIVERY_S = 60.0  # longest wait for a single next record below a known end
_POLL_S = 0.2


def read_to(
    reader: Reader,
    ends: Mapping[Partition, int],
    deadline_s: float = DELIVERY_S,
    *,
    batch: int = 500,
) -> Iterator[Sequence[RawRecord]]:
    """Yield the records of `reader` until it is at `ends`, poll by poll; some may lie behind them.

    Args:
        ends: by partition, as `Bus.ends` returns them.
        deadline_s: longest wait for the next record.
        batch: most records of a poll.

    Raises:
        DeadlineError: nothing was delivered for so long; names each partition and its position.
    """
    at, until_s = reader.positions(), time.monotonic() + deadline_s
    while behind := sorted(p for p, end in ends.items() if at.get(p, 0) < end):
        records = reader.poll(batch, _POLL_S)
        yield records
        before, at = at, reader.positions()
        if records or at != before:
            until_s = time.monotonic() + deadline_s
        elif time.monotonic() > until_s:
            where = "; ".join(f"{p}: at offset {at.get(p, 0)} of {ends[p]}" for p in behind)
            raise DeadlineError(f"reading {where}: nothing came for {deadline_s:g} s")
