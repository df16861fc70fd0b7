"""What is committed to a topic that was created a moment ago is in the log."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from rlstreams.streams.log.bus import Producer
from rlstreams.streams.log.record import Outgoing, Partition, Position
from tests.contract.buses import KafkaCluster
from tests.contract.polling import read

NUM_TOPICS = 6
NUM_PARTITIONS = 16
NUM_RECORDS = 24
PART_BYTES = 800_000  # alone in its batch, so that several batches of a partition are under way
WAIT_S = 60.0


def commit(producer: Producer, records: Sequence[Outgoing]) -> Sequence[Position]:
    return producer.commit(records)


def start(producer: Producer, records: Sequence[Outgoing]) -> Sequence[Position]:
    """As a role does: it goes on while the broker settles the end, and is told no positions."""
    under_way = producer.start(records)
    assert under_way.wait(WAIT_S)
    under_way.result()
    return []


@pytest.mark.parametrize("way", [commit, start])
def test_no_committed_record_is_missing_from_a_fresh_topic(broker: str, run_id: str, way):
    """The first batch of a partition is refused while it is being created; the next ones are not.

    With five requests in flight this lost records in 3 of 10 topics, acknowledged and committed.
    The second half goes to other partitions, once the client knows how many the topic has: `start`
    then takes another way to send.
    """
    cluster = KafkaCluster(broker, run_id)
    bus = cluster.bus()
    with bus.producer("p") as producer, bus.reader() as reader:
        for number in range(NUM_TOPICS):
            topic = f"fresh-{number}"
            cluster.create(topic, NUM_PARTITIONS)
            sent = [
                Outgoing(
                    topic=topic,
                    key=b"k%d" % index,
                    value=(b"%d" % index, bytes(PART_BYTES)),
                    partition=index % 4 + (4 if index >= NUM_RECORDS // 2 else 0),
                )
                for index in range(NUM_RECORDS)
            ]
            half = NUM_RECORDS // 2
            told = [*way(producer, sent[:half]), *way(producer, sent[half:])]
            reader.seek({Partition(topic, partition): 0 for partition in range(8)})
            records = read(reader, NUM_RECORDS)
            # By partition, in the order of offsets.
            assert [(r.partition, r.key) for r in sorted(sent, key=_partition)] == sorted(
                ((r.position.partition, r.key) for r in records), key=lambda it: it[0]
            )
            found = {r.position: r.key for r in records}
            assert [found[position] for position in told] == [r.key for r in sent[: len(told)]]


def _partition(record: Outgoing) -> int:
    return record.partition or 0
