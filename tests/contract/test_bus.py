"""What the ports promise of transactions, records, readers and topics, held against both buses."""

from __future__ import annotations

import time

import pytest

from rlstreams.streams.log.codec import now_ms
from rlstreams.streams.log.errors import (
    AbortedError,
    BrokerError,
    FencedError,
    OffsetGoneError,
    RefusedError,
    TopicMismatchError,
)
from rlstreams.streams.log.parts import part_headers
from rlstreams.streams.log.record import Outgoing, Partition
from rlstreams.streams.run.partitioner import partition_of
from tests.contract.buses import Cluster
from tests.contract.polling import (
    P0,
    P1,
    WAIT_S,
    ends_at,
    reaches,
    read,
    record,
    values,
    within,
)

TORN_WITHIN_S = 0.8
TRIES = 10  # one of them is not held up, on the busiest machine

# Transactions.


def test_a_transaction_is_whole_and_tells_positions(cluster: Cluster):
    """All records of a commit are readable where it says, in order per partition."""
    cluster.create("t", 2)
    bus = cluster.bus()
    with bus.producer("p") as producer:
        sent = [record(b"%d" % n, partition=n % 2) for n in range(6)]
        positions = producer.commit(sent)
    with bus.reader({P0: 0, P1: 0}) as reader:
        found = {r.position: bytes(r.value) for r in read(reader, 6)}
    assert {p: b"%d" % n for n, p in enumerate(positions)} == found
    assert [0, 1, 2] == [p.offset for p in positions if p.partition == 0]


def test_a_started_commit_ends_by_itself(cluster: Cluster):
    """What it carried is readable then; the next one may follow."""
    cluster.create("t", 1)
    bus = cluster.bus()
    with bus.producer("p") as producer, bus.reader({P0: 0}) as reader:
        under_way = producer.start([record(b"first")])
        deadline = time.monotonic() + 60
        while not under_way.wait(0.1):
            assert time.monotonic() < deadline
        under_way.result()
        producer.commit([record(b"second")])
        assert [b"first", b"second"] == values(read(reader, 2))


def test_started_commits_keep_to_the_partition_of_a_key(cluster: Cluster):
    """The first one to a topic and the ones behind it, in which records follow in order."""
    cluster.create("t", 4)
    bus = cluster.bus()
    keys = [b"k%d" % (n % 5) for n in range(20)]
    starts = {Partition("t", n): 0 for n in range(4)}
    with bus.producer("p") as producer, bus.reader(starts) as reader:
        for lap in range(3):
            sent = [
                Outgoing(topic="t", key=k, value=(b"%d" % lap, b"%d" % n))
                for n, k in enumerate(keys)
            ]
            under_way = producer.start(sent)
            deadline = time.monotonic() + 60
            while not under_way.wait(0.1):
                assert time.monotonic() < deadline
            under_way.result()
        found = read(reader, 60)
    assert [partition_of(r.key, 4) for r in found] == [r.partition.number for r in found]
    for key in set(keys):
        mine = [b"%d" % lap + b"%d" % n for lap in range(3) for n, k in enumerate(keys) if k == key]
        assert mine == [bytes(r.value) for r in found if r.key == key]


def test_a_started_commit_tells_that_its_producer_was_fenced(cluster: Cluster):
    """At its end, and every later one at its start."""
    cluster.create("t", 1)
    bus = cluster.bus()
    with bus.producer("p") as older, bus.producer("p"):
        under_way = older.start([record(b"late")])
        deadline = time.monotonic() + 60
        while not under_way.wait(0.1):
            assert time.monotonic() < deadline
        with pytest.raises(FencedError):
            under_way.result()
        with pytest.raises(FencedError):
            older.commit([record(b"later")])


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


def test_what_was_written_since_a_time_is_found_with_what_is_still_open(cluster: Cluster):
    """The end lies behind an open transaction, so who reads that far knows how it ended."""
    cluster.create("t", 2)
    bus = cluster.bus()
    with bus.producer("p") as producer:
        producer.commit([record(b"old", partition=1)])
        # The transaction's marker has a time as well, and may be written behind the commit's end.
        within(WAIT_S, lambda: bus.ends("t")[P1] == 2 or None, "its marker is there")
        time.sleep(0.05)
        at_ms = now_ms()
        producer.commit([record(b"young", partition=1)])
        transaction = cluster.begin("raw")
        transaction.send("t", 1, b"k", b"open", {})
        begin, end = bus.written_since(P1, at_ms)
        assert (begin, end) == (2, 5)
        assert bus.ends("t")[P1] == 4
        assert bus.written_since(P1, at_ms + 3600_000) == (5, 5)
        assert bus.written_since(P0, at_ms) == (0, 0)
        transaction.commit()
        with bus.reader({P1: begin}) as reader:
            assert [b"young", b"open"] == values(read(reader, 2))


def test_a_record_that_is_too_large_refuses_its_transaction(cluster: Cluster):
    """The error says that it never will be written. The next commit may be aborted, once."""
    cluster.create("t", 1)
    cluster.limit("t", 1000)
    bus = cluster.bus()
    with bus.producer("p") as producer, bus.reader({P0: 0}) as reader:
        with pytest.raises(RefusedError):
            producer.commit([record(b"small"), record(b"x" * 5000)])
        try:
            producer.commit([record(b"1")])
        except AbortedError:
            producer.commit([record(b"1")])
        assert [b"1"] == values(read(reader, 1))


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


@pytest.mark.parametrize("known", [(), (b"0",)], ids=["new_topic", "known_topic"])
def test_a_refused_batch_says_that_again_would_not_help(known: tuple[bytes, ...], cluster: Cluster):
    """A partition that is not there aborts the transaction; the producer stays usable.

    Whether the client has heard of the topic before: then it refuses the record by itself.
    """
    cluster.create("t", 1)
    bus = cluster.bus()
    with bus.producer("p") as producer, bus.reader({P0: 0}) as reader:
        for value in known:
            producer.commit([record(value)])
        with pytest.raises(BrokerError, match="would not help"):
            producer.commit([record(b"1"), record(b"2", partition=7)])
        producer.commit([record(b"3")])
        assert [*known, b"3"] == values(read(reader, 1 + len(known)))


def test_a_closed_reader_reads_no_more(cluster: Cluster):
    cluster.create("t", 1)
    bus = cluster.bus()
    with bus.producer("p") as producer, bus.reader({P0: 0}) as reader:
        producer.commit([record(b"1")])
    with pytest.raises(RuntimeError, match="closed"):
        reader.poll(10, 1.0)


# Records.


def test_headers_and_keys_travel(cluster: Cluster):
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
    transaction.send("t", 0, b"k", b"whole", {})
    for index in range(2):
        transaction.send("t", 0, b"k", b"part", dict(part_headers({}, "id", index, 3)))
    transaction.commit()
    waited_s = []
    while not waited_s or (waited_s[-1] > TORN_WITHIN_S and len(waited_s) < TRIES):
        with cluster.bus().reader({P0: 0}) as reader:
            read(reader, 1)
            begun_s = time.monotonic()
            (torn,) = read(reader, 1)
            waited_s.append(time.monotonic() - begun_s)
            assert (b"partpart", b"2/3") == (bytes(torn.value), torn.headers["rlstreams-part"])
            reaches(reader, P0, 4)
    assert waited_s[-1] < TORN_WITHIN_S, waited_s


def test_keys_choose_partitions_by_murmur2(cluster: Cluster):
    """Without a partition named the key decides, on both buses as Kafka's Java client would."""
    cluster.create("t", 8)
    keys = [b"0", b"1", b"12", b"123", b"e3-17", b"rollout.0", b"", b"\xff\xfe\xfd\xfc\xfb"]
    records = [Outgoing(topic="t", key=key, value=(b"v",)) for key in keys]
    with cluster.bus().producer("p") as producer:
        positions = producer.commit(records)
    assert [4, 7, 6, 5, 1, 3, 1, 7] == [p.partition for p in positions]


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
        reader.seek({P1: 0})
        assert [b"other"] == values(read(reader, 1))
        assert {P1} == reader.positions().keys()


@pytest.mark.parametrize("asked", [1, 100])
def test_an_offset_that_is_gone_is_named(cluster: Cluster, asked: int):
    """Below the beginning or beyond the end: refused with the range; a seek revives the reader."""
    cluster.create("t", 1)
    bus = cluster.bus()
    with bus.producer("p") as producer, bus.reader() as reader:
        producer.commit([record(b"%d" % n) for n in range(6)])
        cluster.trim(P0, 4)
        ends_at(bus, P0, 7)
        assert {P0: 4} == bus.beginnings("t")
        reader.seek({P0: asked})
        for _ in range(2):
            with pytest.raises(OffsetGoneError, match=rf"t\[0\].*{asked}.*4 to 7"):
                read(reader, 1)
        reader.seek({P0: 4})
        assert [b"4", b"5"] == values(read(reader, 2))


# Topics.


def test_a_topic_made_anew_has_another_id(cluster: Cluster):
    cluster.create("t", 2)
    bus = cluster.bus()
    before = bus.topic_ids(["t"])
    assert before == cluster.bus().topic_ids(["t"])
    cluster.recreate("t", 3)
    assert before != bus.topic_ids(["t"])
    assert 3 == bus.partitions("t")
    assert bus.cluster_id() == cluster.bus().cluster_id() != ""


def test_a_topic_that_is_not_there_is_named(cluster: Cluster):
    bus = cluster.bus()
    for question in (
        lambda: bus.partitions("no"),
        lambda: bus.topic_ids(["no"]),
        lambda: bus.settings("no"),
        lambda: bus.ends("no"),
        lambda: bus.consumer("g", ["no"]),
    ):
        with pytest.raises(TopicMismatchError, match=r"\.no"):
            question()


def test_polls_that_are_asked_for_nothing_return_in_time(cluster: Cluster):
    cluster.create("t", 1)
    with cluster.bus().reader({P0: 0}) as reader:
        began = time.monotonic()
        assert [] == list(reader.poll(1, 0.5))
        assert 0.4 < time.monotonic() - began < 60.0
