"""What `Producer.commit_stream` promises, held against both buses."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from rlstreams.streams.log.errors import AbortedError, DeadlineError, FencedError, RefusedError
from rlstreams.streams.log.record import Outgoing
from tests.contract.buses import Cluster
from tests.contract.polling import P0, P1, read, record, values


def test_a_stream_is_one_transaction_in_order(cluster: Cluster):
    """Records made while others are sent, some in parts, come back whole and in their order."""
    cluster.create("t", 2)
    bus = cluster.bus()
    large = bytes(range(256)) * 8000
    sent = [(n % 2, large if n % 5 == 4 else b"%d" % n) for n in range(12)]
    with bus.producer("p") as producer:
        producer.commit_stream(record(value, partition=number) for number, value in sent)
        producer.commit_stream(iter([record(b"last")]))
        producer.commit_stream(iter([]))
    with bus.reader({P0: 0, P1: 0}) as reader:
        found = [(r.position.partition, bytes(r.value)) for r in read(reader, 13)]
    for number in (0, 1):
        expected = [v for n, v in [*sent, (0, b"last")] if n == number]
        assert expected == [value for n, value in found if n == number]


@pytest.mark.parametrize("error", [LookupError, DeadlineError, AbortedError])
def test_a_stream_that_breaks_off_never_happened(cluster: Cluster, error: type[Exception]):
    """What its maker raises is raised, nothing of it is read, and the producer goes on.

    Also where the maker reads another log, or a recording: its errors are those of this layer.
    """
    cluster.create("t", 1)
    bus = cluster.bus()

    def broken() -> Iterator[Outgoing]:
        yield record(b"never")
        yield record(b"nor this")
        raise error("no more")

    with bus.producer("p") as producer, bus.reader({P0: 0}) as reader:
        with pytest.raises(error, match="no more"):
            producer.commit_stream(broken())
        with pytest.raises(ValueError, match="names its partition"):
            producer.commit_stream([Outgoing(topic="t", key=b"k", value=(b"nowhere",))])
        producer.commit_stream([record(b"1")])
        assert [b"1"] == values(read(reader, 1))


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_record_that_is_too_large_refuses_its_stream(cluster: Cluster, place: int):
    """Wherever in the stream it lies; nothing of it is read, and the producer goes on."""
    cluster.create("t", 1)
    cluster.limit("t", 1000)
    bus = cluster.bus()
    sent = [record(b"small") for _ in range(3)]
    sent[place] = record(b"x" * 5000)
    with bus.producer("p") as producer, bus.reader({P0: 0}) as reader:
        with pytest.raises(RefusedError):
            producer.commit_stream(sent)
        try:
            producer.commit_stream([record(b"1")])
        except AbortedError:
            producer.commit_stream([record(b"1")])
        assert [b"1"] == values(read(reader, 1))


def test_the_stream_of_a_fenced_producer_ends_it(cluster: Cluster):
    """For good, also when asked again."""
    cluster.create("t", 1)
    bus = cluster.bus()
    older = bus.producer("p")
    older.commit_stream([record(b"1")])
    with bus.producer("p") as newer:
        for _ in range(2):
            with pytest.raises(FencedError):
                older.commit_stream([record(b"2")])
        newer.commit_stream([record(b"3")])
    older.close()
    with bus.reader({P0: 0}) as reader:
        assert [b"1", b"3"] == values(read(reader, 2))
