"""A record that nobody waits for any more, and those behind it."""

from __future__ import annotations

import pytest
from confluent_kafka import Producer

from rlstreams.streams.kafka.appender import KafkaAppender
from rlstreams.streams.log.errors import OutcomeUnknownError
from rlstreams.streams.log.record import Outgoing

NOBODY = {"bootstrap.servers": "127.0.0.1:9", "message.timeout.ms": 200, "log_level": 0}


def test_a_wait_that_was_given_up_ends_no_other() -> None:
    """A call of a lost session is being written: `cancel` would have raised in the thread that
    serves all records, and no call of this worker would ever have been answered again."""
    record = Outgoing(topic="calls", key=b"k", value=[b"v"], partition=0)
    with KafkaAppender(Producer(NOBODY), run="run") as appender:
        assert not appender.append(record).cancel()
        appender._server.join(1.0)
        with pytest.raises(OutcomeUnknownError):
            appender.append(record).result(10.0)
