"""What the ports promise of groups, held against both buses."""

from __future__ import annotations

import threading
import time
from collections.abc import Set

import pytest

from rlstreams.streams.log.errors import AbortedError, BrokerError, OutcomeUnknownError
from rlstreams.streams.log.record import Committed, Partition
from tests.contract.buses import Cluster
from tests.contract.polling import (
    P0,
    P1,
    WAIT_S,
    ends_at,
    joined,
    reaches,
    read,
    record,
    shared_out,
    take,
    values,
    within,
)


def test_positions_and_metadata_come_back(cluster: Cluster):
    cluster.create("t", 2)
    bus = cluster.bus()
    long = "\u00e9" + "m" * 3999
    with bus.producer("p") as producer:
        producer.commit([record(b"%d" % n) for n in range(4)])
        with bus.consumer("g", ["t"]) as consumer:
            (*_, last) = joined(consumer, partitions=2)
            assert {P0: Committed(offset=0), P1: Committed(offset=0)} == {**last.assigned}
            assert [b"0", b"1", b"2", b"3"] == values(take(consumer, 4))
            producer.commit([], {P0: Committed(offset=2, metadata=long)}, consumer)
    assert {P0: Committed(offset=2, metadata=long)} == bus.committed("g", "t")
    with bus.consumer("g", ["t"]) as consumer:
        polls = joined(consumer, partitions=2)
        assert Committed(offset=2, metadata=long) == polls[-1].assigned[P0]
        assert [b"2", b"3"] == values(take(consumer, 2))


def test_a_position_behind_the_end_is_asked_about(cluster: Cluster):
    """Somebody else committed it: the member begins where it is told to, and commits from there."""
    cluster.create("t", 1)
    bus = cluster.bus()
    with bus.producer("p") as producer:
        producer.commit([record(b"%d" % n) for n in range(4)])
        with bus.consumer("g", ["t"]) as consumer:
            joined(consumer, partitions=1)
            producer.commit([], {P0: Committed(offset=10_000)}, consumer)
        asked: list[tuple[Partition, int]] = []
        with bus.consumer("g", ["t"]) as consumer:
            consumer.when_beyond(lambda *of: (asked.append(of), Committed(offset=2))[1])
            assert Committed(offset=2) == joined(consumer, partitions=1)[-1].assigned[P0]
            assert [b"2", b"3"] == values(take(consumer, 2))
            producer.commit([], {P0: Committed(offset=3)}, consumer)
        assert [(P0, 10_000)] == asked
    assert Committed(offset=3) == bus.committed("g", "t")[P0]


def test_metadata_that_is_too_long_is_refused(cluster: Cluster):
    cluster.create("t", 1)
    bus = cluster.bus()
    with bus.producer("p") as producer, bus.consumer("g", ["t"]) as consumer:
        joined(consumer, partitions=1)
        long = {P0: Committed(offset=0, metadata="m" * 5000)}
        with pytest.raises(BrokerError, match="would not help"):
            producer.commit([record(b"never")], long, consumer)
        producer.commit([record(b"1")], {P0: Committed(offset=0)}, consumer)
        assert [b"1"] == values(take(consumer, 1))


def test_a_group_shares_partitions_out(cluster: Cluster):
    """A second member gets half; when it leaves, the first gets them back, from the commit on."""
    cluster.create("t", 4)
    bus = cluster.bus()
    first, second = bus.consumer("g", ["t"]), bus.consumer("g", ["t"])
    with first, bus.producer("p") as producer:
        with second:
            owned = shared_out(first, second, each=2)
            assert not owned[first] & owned[second]
            theirs = sorted(owned[second])
            producer.commit([record(b"1", partition=p.number) for p in theirs])
            take(second, 2)
            producer.commit([], {p: Committed(offset=1) for p in theirs}, second)

        def regained() -> dict[Partition, Committed] | None:
            regain.update(first.poll(10, 0.2).assigned)
            return regain if len(regain) == 2 else None

        regain: dict[Partition, Committed] = {}
        within(WAIT_S, regained, "the first member has its partitions back")
        assert {p: Committed(offset=1) for p in theirs} == regain


def test_a_member_joins_with_its_first_poll(cluster: Cluster):
    """Before, all partitions are the others', for as long as it has something else to do first."""
    cluster.create("t", 2)
    bus = cluster.bus()
    with bus.consumer("g", ["t"]) as later, bus.consumer("g", ["t"]) as first:
        joined(first, partitions=2)
        for _ in range(5):
            assert not first.poll(0, 0.1).revoked

        def shares() -> bool:
            first.poll(0, 0.1)
            return len(later.poll(0, 0.1).assigned) == 1

        within(WAIT_S, shares, "the later member has a partition")


def test_revoked_partitions_bring_no_more_records(cluster: Cluster):
    cluster.create("t", 2)
    bus = cluster.bus()
    with bus.producer("p") as producer:
        producer.commit([record(b"x" * 1000, partition=n % 2) for n in range(400)])
    with bus.consumer("g", ["t"]) as first:
        joined(first, partitions=2, max_records=1)
        with bus.consumer("g", ["t"]) as second:
            revoked: set[Partition] = set()

            def split() -> bool | None:
                second.poll(0, 0.05)
                polled = first.poll(2, 0.05)
                revoked.update(polled.revoked)
                assert not {r.partition for r in polled.records} & revoked
                return True if revoked else None

            within(WAIT_S, split, "a partition is revoked")
            for _ in range(5):
                assert not {r.partition for r in first.poll(5, 0.05).records} & revoked
            assert not first.positions().keys() & revoked


def test_what_is_to_go_is_told_while_its_positions_can_be_committed(cluster: Cluster):
    """The next owner starts from there, whatever it asked before; the rest is nobody's news."""
    cluster.create("t", 2)
    bus = cluster.bus()
    told: list[frozenset[Partition]] = []
    with bus.producer("p") as producer, bus.consumer("g", ["t"]) as first:

        def parting(partitions: Set[Partition]) -> None:
            told.append(frozenset(partitions))
            last = dict.fromkeys(partitions, Committed(offset=0, metadata="last word"))
            producer.commit([], last, first)

        first.before_revoked(parting)
        joined(first, partitions=2)
        with bus.consumer("g", ["t"]) as second:
            revoked: set[Partition] = set()
            given: dict[Partition, Committed] = {}

            def moved() -> bool | None:
                revoked.update(first.poll(0, 0.1).revoked)
                given.update(second.poll(0, 0.1).assigned)
                return True if given else None

            within(WAIT_S, moved, "the second member has a partition")
            assert [revoked] == told
            assert dict.fromkeys(revoked, Committed(offset=0, metadata="last word")) == given
    assert [revoked] == told  # leaving tells nothing: who leaves has committed before


def test_a_member_that_was_dropped_is_told_of_no_parting(cluster: Cluster):
    """What it lost may be another's by then."""
    cluster.create("t", 1)
    bus = cluster.mortal_bus()
    told: list[Set[Partition]] = []
    with bus.consumer("g", ["t"]) as consumer:
        consumer.before_revoked(told.append)
        joined(consumer, partitions=1)
        cluster.expel(consumer)
        within(WAIT_S, lambda: consumer.poll(0, 0.2).revoked or None, "it learns of its loss")
    assert [] == told


def test_what_a_parting_raises_comes_out_of_the_poll(cluster: Cluster):
    """Behind a commit whose outcome is unknown nobody goes on."""
    cluster.create("t", 2)
    bus = cluster.bus()

    def parting(_partitions: Set[Partition]) -> None:
        raise OutcomeUnknownError("no answer")

    with bus.consumer("g", ["t"]) as first:
        first.before_revoked(parting)
        joined(first, partitions=2)
        with bus.consumer("g", ["t"]) as second:

            def joins() -> None:
                first.poll(0, 0.1)
                second.poll(0, 0.1)

            with pytest.raises(OutcomeUnknownError, match="no answer"):
                within(WAIT_S, joins, "a partition is revoked")


def test_a_partition_that_is_not_ours_is_not_committed(cluster: Cluster):
    """The broker would take it from any living member, so the producer refuses it."""
    cluster.create("t", 1)
    bus = cluster.bus()
    with (
        bus.producer("p") as producer,
        bus.consumer("g", ["t"]) as consumer,
        pytest.raises(AbortedError, match=r"t\[0\]"),
    ):
        producer.commit([record(b"1")], {P0: Committed(offset=0)}, consumer)
    assert {} == bus.committed("g", "t")
    assert {P0: 0} == bus.ends("t")


def test_an_expelled_member_commits_nothing(cluster: Cluster):
    """A stalled member's commit is aborted; its next polls tell the loss, then a new start."""
    cluster.create("t", 1)
    bus = cluster.mortal_bus()
    with cluster.bus().producer("p") as producer, bus.consumer("g", ["t"]) as consumer:
        producer.commit([record(b"in")])
        joined(consumer, partitions=1)
        take(consumer, 1)
        cluster.expel(consumer)
        with pytest.raises(AbortedError):
            producer.commit([record(b"never")], {P0: Committed(offset=1)}, consumer)
        events: list[str] = []

        def rejoined() -> bool | None:
            polled = consumer.poll(0, 0.2)
            events.extend(["revoked"] * bool(polled.revoked))
            events.extend(["assigned"] * bool(polled.assigned))
            return True if "assigned" in events else None

        within(WAIT_S, rejoined, "the member is back")
        assert ["revoked", "assigned"] == events
        assert [b"in"] == values(take(consumer, 1))
    assert {} == cluster.bus().committed("g", "t")


def test_committed_waits_for_a_pending_transaction(cluster: Cluster):
    """Both `committed` and an assignment answer only after an open commit has ended."""
    cluster.create("t", 1)
    bus = cluster.bus()
    found: list[object] = []
    with bus.consumer("g", ["t"]) as consumer:
        joined(consumer, partitions=1)
        transaction = cluster.begin("p")
        transaction.add_offsets("g", consumer, {P0: Committed(offset=0, metadata="new")})
    threads = [
        threading.Thread(target=lambda: found.append(dict(bus.committed("g", "t")))),
        threading.Thread(target=lambda: found.append(_first_assignment(cluster))),
    ]
    for thread in threads:
        thread.start()
    time.sleep(1.0)
    before = list(found)
    transaction.commit()
    for thread in threads:
        thread.join(WAIT_S)
    assert [] == before
    assert [{P0: Committed(offset=0, metadata="new")}] * 2 == found


def _first_assignment(cluster: Cluster) -> dict[Partition, Committed]:
    with cluster.bus().consumer("g", ["t"]) as consumer:
        return dict(joined(consumer, partitions=1)[-1].assigned)


def test_positions_step_over_markers(cluster: Cluster):
    """A member and a reader that have read everything stand at the last stable offset."""
    cluster.create("t", 1)
    bus = cluster.bus()
    with bus.producer("p") as producer:
        producer.commit([record(b"1"), record(b"2")])
    transaction = cluster.begin("raw")
    transaction.send("t", 0, b"k", b"never", {})
    transaction.abort()
    ends_at(bus, P0, 5)
    with bus.reader({P0: 0}) as reader, bus.consumer("g", ["t"]) as consumer:
        joined(consumer, partitions=1)
        assert {P0: 0} == reader.positions()
        assert {P0: 0} == consumer.positions()
        read(reader, 2)
        take(consumer, 2)
        reaches(reader, P0, 5)
        reaches(consumer, P0, 5)


def test_what_was_not_delivered_is_no_position(cluster: Cluster):
    cluster.create("t", 1)
    bus = cluster.bus()
    with bus.producer("p") as producer, bus.consumer("g", ["t"]) as consumer:
        producer.commit([record(b"%d" % n) for n in range(50)])
        joined(consumer, partitions=1)
        for _ in range(30):
            assert () == tuple(consumer.poll(0, 0.01).records)
        assert {P0: 0} == consumer.positions()
        assert [b"0", b"1"] == values(take(consumer, 2))
        assert {P0: 2} == consumer.positions()
        assert [b"%d" % n for n in range(2, 50)] == values(take(consumer, 48))


def test_paused_partitions_wait(cluster: Cluster):
    cluster.create("t", 2)
    bus = cluster.bus()
    with bus.producer("p") as producer, bus.consumer("g", ["t"]) as consumer:
        joined(consumer, partitions=2)
        consumer.pause(frozenset({P0}))
        producer.commit([record(b"%d" % n, partition=n % 2) for n in range(20)])
        assert {1} == {r.partition.number for r in take(consumer, 10)}
        assert () == tuple(consumer.poll(1, 0.3).records)
        assert 0 == consumer.positions()[P0]
        consumer.pause(frozenset({P1}))
        assert [b"%d" % n for n in range(0, 20, 2)] == values(take(consumer, 10))


def test_a_partition_that_went_while_paused_comes_back_awake(cluster: Cluster):
    """Paused, taken over by another member, no longer to be paused, and then ours again."""
    cluster.create("t", 2)
    bus = cluster.bus()
    with bus.producer("p") as producer, bus.consumer("g", ["t"]) as member:
        producer.commit([record(b"%d" % n, partition=n % 2) for n in range(20)])
        joined(member, partitions=2)
        member.pause(frozenset({P0, P1}))
        assert () == tuple(member.poll(4, 0.5).records)  # both are fetched, and held
        gone: set[Partition] = set()
        with bus.consumer("g", ["t"]) as other:

            def moved() -> bool | None:
                gone.update(member.poll(4, 0.1).revoked)
                return True if other.poll(0, 0.1).assigned else None

            within(WAIT_S, moved, "the other has a partition")
        assert 1 == len(gone)
        member.pause(frozenset())
        found: list[bytes] = []

        def all_came() -> bool | None:
            found.extend(values(member.poll(20, 0.1).records))
            return True if len(found) >= 20 else None

        within(WAIT_S, all_came, "all records came")
        assert {b"%d" % n for n in range(20)} == set(found)


def test_a_partition_that_moved_on_is_not_committed_by_who_had_it(cluster: Cluster):
    """A member that has polled since would be believed by the broker, for any partition."""
    cluster.create("t", 2)
    bus = cluster.bus()
    with (
        bus.producer("p") as producer,
        bus.consumer("g", ["t"]) as first,
        bus.consumer("g", ["t"]) as second,
    ):
        owned = shared_out(first, second, each=1)
        (mine,), (theirs,) = owned[first], owned[second]
        with pytest.raises(AbortedError, match="not ours"):
            producer.commit([record(b"never")], {theirs: Committed(offset=0)}, first)
        producer.commit([], {mine: Committed(offset=0, metadata="mine")}, first)
    assert {mine: Committed(offset=0, metadata="mine")} == bus.committed("g", "t")


def test_a_consumer_that_never_joined_commits_nothing(cluster: Cluster):
    """Into a group with a living member; a classic group would take it."""
    cluster.create("t", 1)
    bus = cluster.bus()
    with bus.producer("p") as producer, bus.consumer("g", ["t"]) as member:
        joined(member, partitions=1)  # before the other: a client may join without a poll
        with bus.consumer("g", ["t"]) as stranger, pytest.raises(AbortedError):
            producer.commit([record(b"never")], {P0: Committed(offset=0)}, stranger)
    assert {} == bus.committed("g", "t")


def test_a_poll_stops_at_its_bytes(cluster: Cluster):
    """What was fetched may come on top; what was not comes with the next polls, in order."""
    cluster.create("t", 1)
    bus = cluster.bus()
    with bus.producer("p") as producer, bus.consumer("g", ["t"]) as consumer:
        producer.commit([record(b"%2d" % n + b"x" * 100_000) for n in range(40)])
        joined(consumer, partitions=1)
        found = within(
            WAIT_S, lambda: consumer.poll(40, 0.2, max_bytes=1).records or None, "a record"
        )
        assert [b"%2d" % n for n in range(len(found))] == [v[:2] for v in values(found)]
        rest = take(consumer, 40 - len(found)) if len(found) < 40 else []
        assert [b"%2d" % n for n in range(40)] == [v[:2] for v in values([*found, *rest])]
