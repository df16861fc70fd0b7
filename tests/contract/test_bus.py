"""The promises of the ports, held against both buses."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import pytest

from streams.bus import GroupConsumer, Polled, Reader
from streams.errors import (
    AbortedError,
    BrokerError,
    FencedError,
    OffsetGoneError,
    TopicMismatchError,
)
from streams.parts import part_headers
from streams.record import Committed, Outgoing, Partition, RawRecord
from tests.contract.buses import Cluster, KafkaCluster, MemoryCluster

T = TypeVar("T")
P0 = Partition("t", 0)
WAIT_S = 20.0


@pytest.fixture(params=["memory", pytest.param("kafka", marks=pytest.mark.broker)])
def cluster(request: pytest.FixtureRequest, run_id: str) -> Cluster:
    if request.param == "memory":
        return MemoryCluster(run_id)
    return KafkaCluster(request.getfixturevalue("broker"), run_id)


def record(value: bytes, *, key: bytes = b"k", topic: str = "t", partition: int = 0) -> Outgoing:
    return Outgoing(topic=topic, key=key, value=(value,), partition=partition)


def within(seconds: float, attempt: Callable[[], T | None], what: str) -> T:
    """The first answer of `attempt` that is not None."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if (answer := attempt()) is not None:
            return answer
    raise AssertionError(f"not within {seconds} s: {what}")


def read(reader: Reader, count: int) -> list[RawRecord]:
    """Exactly `count` records."""
    records: list[RawRecord] = []
    deadline = time.monotonic() + WAIT_S
    while len(records) < count and time.monotonic() < deadline:
        records += reader.poll(count - len(records), 0.5)
    assert count == len(records)
    return records


def values(records: Sequence[RawRecord]) -> list[bytes]:
    return [bytes(record.value) for record in records]


def joined(consumer: GroupConsumer, *, partitions: int, max_records: int = 0) -> list[Polled]:
    """Polls until the member has that many partitions."""
    owned: set[Partition] = set()
    polls: list[Polled] = []

    def attempt() -> list[Polled] | None:
        polls.append(consumer.poll(max_records, 0.2))
        owned.difference_update(polls[-1].revoked)
        owned.update(polls[-1].assigned)
        return polls if len(owned) == partitions else None

    return within(WAIT_S, attempt, f"a member has {partitions} partitions")


def take(consumer: GroupConsumer, count: int) -> list[RawRecord]:
    records: list[RawRecord] = []
    deadline = time.monotonic() + WAIT_S
    while len(records) < count and time.monotonic() < deadline:
        records += consumer.poll(count - len(records), 0.5).records
    assert count == len(records)
    return records


def reaches(source: GroupConsumer | Reader, partition: Partition, offset: int) -> None:
    """Polls until the position is there, delivering nothing."""

    def attempt() -> bool | None:
        polled = source.poll(1, 0.1)
        assert not (polled.records if isinstance(polled, Polled) else polled)
        return True if source.positions()[partition] == offset else None

    within(WAIT_S, attempt, f"{partition} reaches {offset}, is at {source.positions()}")


# Transactions.


def test_a_transaction_is_whole_and_tells_positions(cluster: Cluster):
    """All records of a commit are readable where it says, in order per partition."""
    cluster.create("t", 2)
    bus = cluster.bus()
    with bus.producer("p") as producer:
        sent = [record(b"%d" % n, partition=n % 2) for n in range(6)]
        positions = producer.commit(sent)
    with bus.reader({P0: 0, Partition("t", 1): 0}) as reader:
        found = {r.position: bytes(r.value) for r in read(reader, 6)}
    assert {p: b"%d" % n for n, p in enumerate(positions)} == found
    assert [0, 1, 2] == [p.offset for p in positions if p.partition == 0]


def test_open_and_aborted_records_are_not_read(cluster: Cluster):
    """Records of an open transaction hold back what lies behind; aborted ones never appear."""
    cluster.create("t", 1)
    bus = cluster.bus()
    transaction = cluster.begin("raw")
    transaction.send("t", 0, b"k", b"never", {})
    with bus.producer("p") as producer, bus.reader({P0: 0}) as reader:
        producer.commit([record(b"behind")])
        assert [] == list(reader.poll(1, 0.5))
        assert {P0: 0} == bus.ends("t")
        transaction.abort()
        assert [b"behind"] == values(read(reader, 1))


def test_a_newer_producer_fences_the_older(cluster: Cluster):
    """The older one's next commit fails for good, also when asked again; the newer one works."""
    cluster.create("t", 1)
    bus = cluster.bus()
    older = bus.producer("p")
    older.commit([record(b"1")])
    newer = bus.producer("p")
    for _ in range(2):
        with pytest.raises(FencedError, match=r"\.p"):
            older.commit([record(b"2")])
    newer.commit([record(b"3")])
    with bus.reader({P0: 0}) as reader:
        assert [b"1", b"3"] == values(read(reader, 2))
    older.close()
    newer.close()


def test_an_empty_commit_of_a_zombie_proves_nothing(cluster: Cluster):
    """Nothing to commit is answered without asking who owns the id."""
    cluster.create("t", 1)
    bus = cluster.bus()
    with bus.producer("p") as older, bus.producer("p"):
        assert [] == list(older.commit([]))
        assert [] == list(older.commit([], {}, None))
        with pytest.raises(FencedError):
            older.commit([record(b"1")])


def test_making_a_producer_settles_its_predecessors_transaction(cluster: Cluster):
    """After it, the predecessor's open records are gone and hold nobody up."""
    cluster.create("t", 1)
    bus = cluster.bus()
    cluster.begin("p").send("t", 0, b"k", b"never", {})
    with bus.producer("p") as producer, bus.reader({P0: 0}) as reader:
        producer.commit([record(b"1")])
        assert [b"1"] == values(read(reader, 1))


def test_a_refused_batch_says_that_again_would_not_help(cluster: Cluster):
    """A partition that is not there aborts the transaction; the producer stays usable."""
    cluster.create("t", 1)
    bus = cluster.bus()
    with bus.producer("p") as producer, bus.reader({P0: 0}) as reader:
        with pytest.raises(BrokerError, match="would not help"):
            producer.commit([record(b"1"), record(b"2", partition=7)])
        producer.commit([record(b"3")])
        assert [b"3"] == values(read(reader, 1))


# Records.


def test_headers_and_keys_travel(cluster: Cluster):
    """Key, headers and value come back as they were sent, an empty value too."""
    cluster.create("t", 1)
    bus = cluster.bus()
    headers = {"rlstreams-id": b"7/0/0", "other": b"\x00\xff"}
    with bus.producer("p") as producer:
        producer.commit([Outgoing(topic="t", key=b"7", value=(), headers=headers, partition=0)])
    with bus.reader({P0: 0}) as reader:
        (found,) = read(reader, 1)
    assert (b"7", headers, b"") == (found.key, dict(found.headers), bytes(found.value))
    assert abs(time.time() * 1000 - found.timestamp_ms) < 60_000


def test_large_records_come_back_whole(cluster: Cluster):
    """5 MB given in pieces travels in parts; its position is that of part 0."""
    cluster.create("t", 1)
    bus = cluster.bus()
    pieces = [bytes([n]) * 1_000_003 for n in range(5)]
    large = Outgoing(
        topic="t",
        key=b"k",
        value=[memoryview(p) for p in pieces],
        headers={"h": b"1"},
        partition=0,
    )
    with bus.producer("p") as producer:
        positions = producer.commit([record(b"before"), large, record(b"after")])
    with bus.reader({P0: 0}) as reader:
        before, whole, after = read(reader, 3)
    assert [b"before", b"after"] == values([before, after])
    assert b"".join(pieces) == bytes(whole.value)
    assert {"h": b"1"} == dict(whole.headers)
    assert [1, 2, 3, 4, 5, 6] == list(whole.offsets)
    assert positions == [r.position for r in (before, whole, after)]


def test_parts_of_two_writers_with_one_key_may_interleave(cluster: Cluster):
    """Parts are joined by record id, and a position stays at the first incomplete record."""
    cluster.create("t", 1)
    one, other = cluster.begin("one"), cluster.begin("other")
    for index in range(3):
        for transaction, name in ((one, "a"), (other, "b")):
            part = name.encode() * (index + 1)
            transaction.send("t", 0, b"k", part, dict(part_headers({}, name, index, 3)))
    one.commit()
    other.commit()
    with cluster.bus().reader({P0: 0}) as reader:
        first = read(reader, 1)
        assert {P0: 1} == reader.positions()
        second = read(reader, 1)
    assert [b"aaaaaa", b"bbbbbb"] == values(first + second)
    assert [(0, 2, 4), (1, 3, 5)] == [r.offsets for r in first + second]


def test_a_start_inside_a_record_skips_its_rest(cluster: Cluster):
    """Parts whose part 0 lies before the start are no record."""
    cluster.create("t", 1)
    bus = cluster.bus()
    with bus.producer("p") as producer:
        producer.commit([record(b"x" * 2_000_000), record(b"next")])
    with bus.reader({P0: 1}) as reader:
        assert [b"next"] == values(read(reader, 1))


def test_a_torn_record_is_given_out_as_far_as_it_came(cluster: Cluster):
    """Parts that were never committed hold up nobody: what there is says so in its header."""
    cluster.create("t", 1)
    transaction = cluster.begin("raw")
    for index in range(2):
        transaction.send("t", 0, b"k", b"part", dict(part_headers({}, "id", index, 3)))
    transaction.commit()
    with cluster.bus().reader({P0: 0}) as reader:
        (torn,) = read(reader, 1)
        assert (b"partpart", b"2/3") == (bytes(torn.value), torn.headers["rlstreams-part"])
        reaches(reader, P0, 3)


def test_keys_choose_partitions_by_murmur2(cluster: Cluster):
    """Without a partition named the key decides, on both buses as Kafka's Java client would."""
    cluster.create("t", 8)
    keys = [b"0", b"1", b"12", b"123", b"e3-17", b"rollout.0", b"", b"\xff\xfe\xfd\xfc\xfb"]
    records = [Outgoing(topic="t", key=key, value=(b"v",)) for key in keys]
    with cluster.bus().producer("p") as producer:
        positions = producer.commit(records)
    assert [6, 0, 7, 5, 0, 2, 1, 7] == [p.partition for p in positions]


# Groups.


def test_positions_and_metadata_come_back(cluster: Cluster):
    """A commit's offsets and metadata, 4000 characters too, meet the next member and `committed`."""
    cluster.create("t", 2)
    bus = cluster.bus()
    long = "\u00e9" + "m" * 3999
    with bus.producer("p") as producer:
        producer.commit([record(b"%d" % n) for n in range(4)])
        with bus.consumer("g", ["t"]) as consumer:
            (*_, last) = joined(consumer, partitions=2)
            assert {P0: Committed(offset=0), Partition("t", 1): Committed(offset=0)} == {
                **last.assigned
            }
            assert [b"0", b"1", b"2", b"3"] == values(take(consumer, 4))
            producer.commit([], {P0: Committed(offset=2, metadata=long)}, consumer)
    assert {P0: Committed(offset=2, metadata=long)} == bus.committed("g", "t")
    with bus.consumer("g", ["t"]) as consumer:
        polls = joined(consumer, partitions=2)
        assert Committed(offset=2, metadata=long) == polls[-1].assigned[P0]
        assert [b"2", b"3"] == values(take(consumer, 2))


def test_metadata_that_is_too_long_is_refused(cluster: Cluster):
    """Nothing of the transaction happens, and the producer stays usable."""
    cluster.create("t", 1)
    bus = cluster.bus()
    with bus.producer("p") as producer, bus.consumer("g", ["t"]) as consumer:
        joined(consumer, partitions=1)
        with pytest.raises(BrokerError, match="would not help"):
            long = {P0: Committed(offset=0, metadata="m" * 5000)}
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
            owned: dict[GroupConsumer, set[Partition]] = {first: set(), second: set()}

            def shared() -> bool | None:
                for member, partitions in owned.items():
                    polled = member.poll(0, 0.1)
                    partitions.difference_update(polled.revoked)
                    partitions.update(polled.assigned)
                return True if {2} == {len(p) for p in owned.values()} else None

            within(WAIT_S, shared, "two members have two partitions each")
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


def test_revoked_partitions_bring_no_more_records(cluster: Cluster):
    """After a poll that revokes, no record of those partitions comes and no position is told."""
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


def test_a_partition_that_is_not_ours_is_not_committed(cluster: Cluster):
    """The broker would take it from any living member, so the producer refuses it."""
    cluster.create("t", 1)
    bus = cluster.bus()
    with bus.producer("p") as producer, bus.consumer("g", ["t"]) as consumer:
        with pytest.raises(AbortedError, match=r"t\[0\]"):
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
    assert {} == bus.committed("g", "t")


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
    assert {P0: 5} == bus.ends("t")
    with bus.reader({P0: 0}) as reader, bus.consumer("g", ["t"]) as consumer:
        joined(consumer, partitions=1)
        assert {P0: 0} == reader.positions()
        assert {P0: 0} == consumer.positions()
        read(reader, 2)
        take(consumer, 2)
        reaches(reader, P0, 5)
        reaches(consumer, P0, 5)


def test_what_was_not_delivered_is_no_position(cluster: Cluster):
    """Polls for no records keep the membership and the position; then all comes, in order."""
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
    """Exactly the named partitions deliver nothing until pause is called again."""
    cluster.create("t", 2)
    bus = cluster.bus()
    with bus.producer("p") as producer, bus.consumer("g", ["t"]) as consumer:
        joined(consumer, partitions=2)
        consumer.pause(frozenset({P0}))
        producer.commit([record(b"%d" % n, partition=n % 2) for n in range(20)])
        assert {1} == {r.partition.number for r in take(consumer, 10)}
        assert () == tuple(consumer.poll(1, 0.3).records)
        assert 0 == consumer.positions()[P0]
        consumer.pause(frozenset({Partition("t", 1)}))
        assert [b"%d" % n for n in range(0, 20, 2)] == values(take(consumer, 10))


# Readers.


def test_seek_reads_exactly_what_it_names(cluster: Cluster):
    """A seek goes back, forward, and to other partitions."""
    cluster.create("t", 2)
    bus = cluster.bus()
    with bus.producer("p") as producer, bus.reader() as reader:
        assert [] == list(reader.poll(1, 0.05))
        producer.commit([record(b"%d" % n) for n in range(4)])
        producer.commit([record(b"other", partition=1)])
        reader.seek({P0: 0})
        assert [b"0", b"1"] == values(read(reader, 2))
        reader.seek({P0: 3})
        assert [b"3"] == values(read(reader, 1))
        reader.seek({P0: 1})
        assert {P0: 1} == reader.positions()
        assert [b"1"] == values(read(reader, 1))
        reader.seek({Partition("t", 1): 0})
        assert [b"other"] == values(read(reader, 1))
        assert {Partition("t", 1)} == reader.positions().keys()


@pytest.mark.parametrize("asked", [1, 100])
def test_an_offset_that_is_gone_is_named(cluster: Cluster, asked: int):
    """Below the beginning or beyond the end: refused with the range; a seek revives the reader."""
    cluster.create("t", 1)
    bus = cluster.bus()
    with bus.producer("p") as producer, bus.reader() as reader:
        producer.commit([record(b"%d" % n) for n in range(6)])
        cluster.trim(P0, 4)
        assert ({P0: 4}, {P0: 7}) == (bus.beginnings("t"), bus.ends("t"))
        reader.seek({P0: asked})
        for _ in range(2):
            with pytest.raises(OffsetGoneError, match=rf"t\[0\].*{asked}.*4 to 7"):
                read(reader, 1)
        reader.seek({P0: 4})
        assert [b"4", b"5"] == values(read(reader, 2))


# Topics.


def test_a_topic_made_anew_has_another_id(cluster: Cluster):
    """Ids tell a topic from its namesake; the cluster's id stays."""
    cluster.create("t", 2)
    bus = cluster.bus()
    before = bus.topic_ids(["t"])
    assert before == cluster.bus().topic_ids(["t"])
    cluster.recreate("t", 3)
    assert before != bus.topic_ids(["t"])
    assert 3 == bus.partitions("t")
    assert bus.cluster_id() == cluster.bus().cluster_id() != ""


def test_a_topic_that_is_not_there_is_named(cluster: Cluster):
    """Questions about it and joining for it say so."""
    bus = cluster.bus()
    for question in (
        lambda: bus.partitions("no"),
        lambda: bus.topic_ids(["no"]),
        lambda: bus.ends("no"),
        lambda: bus.consumer("g", ["no"]),
    ):
        with pytest.raises(TopicMismatchError, match=r"\.no"):
            question()


def test_polls_that_are_asked_for_nothing_return_in_time(cluster: Cluster):
    """A poll without news keeps its timeout."""
    cluster.create("t", 1)
    with cluster.bus().reader({P0: 0}) as reader:
        began = time.monotonic()
        assert [] == list(reader.poll(1, 0.5))
        assert 0.4 < time.monotonic() - began < 2.0
