"""What `Bus.schemas` promises, on both kinds of cluster."""

from __future__ import annotations

import pytest

from rlstreams.schemas import UnknownSchemaError
from rlstreams.schemas.avro import fingerprint
from rlstreams.schemas.binary import MARKER
from rlstreams.schemas.events import EVENTS
from rlstreams.streams.log.codec import decoded, outgoing
from rlstreams.streams.log.record import Outgoing, Partition
from rlstreams.streams.log.topics import SCHEMAS, STEPS
from tests import factories
from tests.contract.buses import Cluster
from tests.contract.polling import ends_at, read
from tests.newer_release import newer, newer_text, publish


def test_a_record_of_a_newer_release_is_read_once_its_schema_is_there(cluster: Cluster) -> None:
    """Without the topic, with an empty one, with a stranger's record in it, with the schema."""
    bus = cluster.bus()
    print_ = fingerprint(newer_text("StepCompleted"))
    assert bus.schemas().get(print_) is None
    cluster.create(SCHEMAS.name, 1)
    cluster.create(STEPS.name, 1)
    assert cluster.bus().schemas().get(print_) is None
    with bus.producer("pen") as pen:
        pen.commit([Outgoing(topic=SCHEMAS.name, key=b"?", value=[b"rubbish"], partition=0)])
    publish(bus)
    with bus.producer("pen") as pen:
        pen.commit([newer(outgoing(STEPS, factories.step_completed()))])
        pen.commit([Outgoing(topic=STEPS.name, key=b"", value=[MARKER + b"12345678"])])
    ends_at(bus, Partition(SCHEMAS.name, 0), len(EVENTS) + 3)  # the markers of transactions count
    reading = cluster.bus()
    with reading.reader(reading.beginnings(STEPS.name)) as reader:
        ours, theirs = read(reader, 2)
    assert factories.step_completed() == decoded(ours, reading.schemas()).event
    with pytest.raises(UnknownSchemaError):
        decoded(theirs, reading.schemas())
