"""A member that leaves its group and comes back, held against both buses."""

from __future__ import annotations

from collections.abc import Set

import pytest

from rlstreams.streams.log.errors import AbortedError
from rlstreams.streams.log.record import Committed, Partition
from tests.contract.buses import Cluster
from tests.contract.polling import WAIT_S, record, shared_out, take, within


def test_who_leaves_hands_over_at_once_and_comes_back_with_a_poll(cluster: Cluster):
    """Its positions can be committed until then; later it is a new member with its share."""
    cluster.create("t", 2)
    bus = cluster.bus()
    told: list[frozenset[Partition]] = []
    last_word = Committed(offset=0, metadata="last word")
    with bus.producer("p") as producer, bus.consumer("g", ["t"]) as first:

        def parting(partitions: Set[Partition]) -> None:
            told.append(frozenset(partitions))
            producer.commit([], dict.fromkeys(partitions, last_word), first)

        first.before_revoked(parting)
        with bus.consumer("g", ["t"]) as second:
            owned = shared_out(first, second, each=1)
            del told[:]
            assert first.leave() == owned[first]
            assert ([frozenset(owned[first])], {}) == (told, first.positions())
            with pytest.raises(AbortedError, match="not ours"):
                producer.commit([], dict.fromkeys(owned[first], Committed(offset=1)), first)

            def taken_over() -> dict[Partition, Committed] | None:
                return dict(second.poll(0, 0.1).assigned) or None

            given = within(WAIT_S, taken_over, "the other member has all")
            assert dict.fromkeys(owned[first], last_word) == given
            producer.commit([record(b"again", partition=n) for n in range(2)])

            def comes_back() -> dict[Partition, Committed]:
                second.poll(0, 0.1)
                return dict(first.poll(0, 0.1).assigned)

            (mine,) = within(WAIT_S, lambda: comes_back() or None, "it has its share again")
            take(first, 1)
            producer.commit([], {mine: Committed(offset=1)}, first)
    assert Committed(offset=1) == bus.committed("g", "t")[mine]
