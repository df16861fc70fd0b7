"""What an `Appender` promises, held against both buses."""

from __future__ import annotations

import threading
from concurrent.futures import Future

import pytest

from rlstreams.streams.log.errors import RefusedError
from rlstreams.streams.log.parts import PART_BYTES
from rlstreams.streams.log.record import Outgoing, Position
from tests.contract.buses import DEADLINE_S, Cluster
from tests.contract.polling import P0, P1, read, record, values


def test_what_is_acknowledged_lies_where_it_says(cluster: Cluster):
    """From any thread; those of one thread and one partition come in their order."""
    cluster.create("t", 2)
    bus = cluster.bus()
    sent: dict[int, list[Future[Position]]] = {0: [], 1: []}

    def write(number: int) -> None:
        for n in range(50):
            sent[number].append(appender.append(record(b"%d" % n, partition=number)))

    with bus.appender() as appender, bus.reader({P0: 0, P1: 0}) as reader:
        threads = [threading.Thread(target=write, args=(number,)) for number in sent]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        places = {n: [one.result(DEADLINE_S) for one in futures] for n, futures in sent.items()}
        found = {r.position: bytes(r.value) for r in read(reader, 100)}
    for number, mine in places.items():
        assert [found[place] for place in mine] == [b"%d" % n for n in range(50)]
        assert mine == sorted(mine, key=lambda place: place.offset)
        assert {place.partition for place in mine} == {number}


def test_readers_meet_it_behind_a_transaction_that_was_open_before(cluster: Cluster):
    """The order of a partition is that of its offsets, whoever wrote how."""
    cluster.create("t", 1)
    bus = cluster.bus()
    with bus.appender() as appender, bus.reader({P0: 0}) as reader:
        appender.append(record(b"first")).result(DEADLINE_S)
        open_one = cluster.begin("p")
        open_one.send("t", 0, b"k", b"second", {})
        appender.append(record(b"third")).result(DEADLINE_S)
        assert values(read(reader, 1)) == [b"first"]
        open_one.commit()
        assert values(read(reader, 2)) == [b"second", b"third"]


def test_one_that_the_topic_does_not_take_is_refused_alone(cluster: Cluster):
    cluster.create("t", 1)
    cluster.limit("t", 1000)
    bus = cluster.bus()
    with bus.appender() as appender, bus.reader({P0: 0}) as reader:
        with pytest.raises(RefusedError, match=r"record|bytes"):
            appender.append(record(b"x" * 5000)).result(DEADLINE_S)
        appender.append(record(b"small")).result(DEADLINE_S)
        assert values(read(reader, 1)) == [b"small"]


def test_who_waits_no_longer_takes_nothing_from_the_others(cluster: Cluster):
    """A session that is lost while its call is being written: the record lies there all the same,
    and records behind it are acknowledged."""
    cluster.create("t", 1)
    bus = cluster.bus()
    with bus.appender() as appender, bus.reader({P0: 0}) as reader:
        for number in range(20):
            assert not appender.append(record(b"%d" % number)).cancel()
        appender.append(record(b"last")).result(DEADLINE_S)
        assert values(read(reader, 21)) == [*(b"%d" % n for n in range(20)), b"last"]


def test_a_record_of_several_parts_is_not_taken(cluster: Cluster):
    cluster.create("t", 1)
    with (
        cluster.bus().appender() as appender,
        pytest.raises(ValueError, match="several parts"),
    ):
        appender.append(Outgoing(topic="t", key=b"k", value=(b"x" * (PART_BYTES + 1),)))
