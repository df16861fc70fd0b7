"""A member that inherits partitions from a peer that died in a commit, on both buses."""

from __future__ import annotations

import time

import pytest

from rlstreams.streams.log.bus import GroupConsumer, Polled
from rlstreams.streams.log.errors import AbortedError
from rlstreams.streams.log.record import Committed, Partition
from tests.contract.buses import Cluster
from tests.contract.polling import WAIT_S, record, shared_out, within


class Inheriting:
    """A member whose peer left in the middle of a commit: it has the peer's partition and no
    position of it yet."""

    def __init__(self, cluster: Cluster) -> None:
        cluster.create("t", 2)
        self.bus = cluster.bus()
        self.member = cluster.mortal_bus().consumer("g", ["t"])
        with self.bus.consumer("g", ["t"]) as peer:
            owned = shared_out(self.member, peer, each=1)
            (self.own,), (self.inherited,) = owned[self.member], owned[peer]
            self.transaction = cluster.begin("dead")
            self.transaction.add_offsets("g", peer, {self.inherited: self.left})
        with self.bus.producer("p") as producer:
            producer.commit([record(b"%d" % n, partition=n % 2) for n in range(20)])

    left = Committed(offset=3, metadata="new")

    def polled(self, seconds: float) -> tuple[list[Polled], float]:
        """Polls for so long, and the seconds that the longest took."""
        polls, longest_s, deadline = [], 0.0, time.monotonic() + seconds
        while (began_s := time.monotonic()) < deadline:
            polls.append(self.member.poll(1, 0.02))
            longest_s = max(longest_s, time.monotonic() - began_s)
        return polls, longest_s


def test_polls_go_on_while_a_predecessors_transaction_is_open(cluster: Cluster):
    """A member that inherits from a dead peer serves its own partitions, and commits them."""
    heir = Inheriting(cluster)
    with heir.member, heir.bus.producer("own") as producer:
        polls, longest_s = heir.polled(6.0)
        assert longest_s < 1.0
        assert {heir.own} == {r.partition for polled in polls for r in polled.records}
        assert heir.inherited not in {p for polled in polls for p in polled.assigned}
        producer.commit([], {heir.own: Committed(offset=10)}, heir.member)
        with pytest.raises(AbortedError, match="not ours"):
            producer.commit([], {heir.inherited: Committed(offset=0)}, heir.member)
        heir.transaction.commit()
        found = within(WAIT_S, lambda: heir.member.poll(0, 0.1).assigned or None, "its position")
        assert {heir.inherited: heir.left} == found
        assert {heir.inherited} == {r.partition for r in heir.member.poll(10, 5.0).records}


def test_a_member_that_waits_for_a_position_can_leave(cluster: Cluster):
    heir = Inheriting(cluster)
    heir.polled(3.0)
    began_s = time.monotonic()
    heir.member.close()
    assert time.monotonic() - began_s < 5.0
    heir.transaction.abort()
    with heir.bus.consumer("g", ["t"]) as successor:
        assert {heir.own, heir.inherited} == _given(successor)


def test_a_member_that_is_dropped_while_it_waits_joins_anew(cluster: Cluster):
    """What it has no position of is taken back with the rest, and comes again."""
    heir = Inheriting(cluster)
    with heir.member:
        heir.polled(3.0)
        cluster.expel(heir.member)
        polls, longest_s = heir.polled(8.0)
        assert longest_s < 1.0
        assert heir.own in {p for polled in polls for p in polled.revoked}
        heir.transaction.abort()
        again = {p for polled in polls for p in polled.assigned} | _given(heir.member)
        assert {heir.own, heir.inherited} == again


def _given(member: GroupConsumer) -> set[Partition]:
    """What it is given until it has been given something and no more comes for a second."""
    found: set[Partition] = set()
    since_s = time.monotonic()
    while not found or time.monotonic() < since_s + 3.0:
        found |= member.poll(0, 0.1).assigned.keys()
        assert time.monotonic() < since_s + WAIT_S
    return found
