"""What is committed to a topic that was created a moment ago is in the log."""

from __future__ import annotations

from streams.record import Outgoing, Partition
from tests.contract.buses import KafkaCluster
from tests.contract.polling import read

NUM_TOPICS = 10
NUM_PARTITIONS = 16
NUM_RECORDS = 24
PART_BYTES = 800_000  # alone in its batch, so that several batches of a partition are under way


def test_no_committed_record_is_missing_from_a_fresh_topic(broker: str, run_id: str):
    """The first batch of a partition is refused while it is being created; the next ones are not.

    With five requests in flight this lost records in 3 of 10 topics, acknowledged and committed.
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
                    partition=index % 4,
                )
                for index in range(NUM_RECORDS)
            ]
            positions = producer.commit(sent)
            reader.seek({Partition(topic, partition): 0 for partition in range(4)})
            found = {record.position: record.key for record in read(reader, NUM_RECORDS)}
            assert dict(zip(positions, (record.key for record in sent), strict=True)) == found
