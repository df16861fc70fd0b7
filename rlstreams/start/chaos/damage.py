"""Damage to what the log carries: records that nobody can read."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from contextlib import suppress

from rlstreams.schemas import DecodeError, decode
from rlstreams.streams.log.bus import Bus
from rlstreams.streams.log.errors import StreamsError
from rlstreams.streams.log.record import Outgoing, RawRecord
from rlstreams.streams.log.topics import SCHEMAS, TOPICS
from rlstreams.workers.bootstrap.parts import open_bus
from rlstreams.workers.config.run import RunConfig

RECORDS_PER_TOPIC = 6
READ_S = 2.0


def damaged(value: bytes, draw: random.Random) -> bytes:
    """A record's value, damaged at random; what comes out may still be readable."""
    start, end = sorted((draw.randrange(len(value) + 1), draw.randrange(len(value) + 1)))
    kinds = (
        lambda: b"",
        lambda: value[:end],
        lambda: value[:10] + draw.randbytes(draw.randrange(200)),
        lambda: value[:start] + draw.randbytes(end - start) + value[end:],
        lambda: value[:start] + b"\xff" * 10 + value[start:],  # a length beyond all bounds
        lambda: value[:2] + draw.randbytes(8) + value[10:],  # a schema that nobody wrote
        lambda: b'{"a": 1}',
    )
    return draw.choice(kinds)()


class Vandal:
    """Writes damaged copies of a run's newest records into each of its topics but that of schemas,
    in a thread: the loop of `up` never waits for it."""

    def __init__(self, config: RunConfig, seed: int) -> None:
        self._config = config
        self._seed = seed
        self._thread: threading.Thread | None = None
        self._written: set[int] = set()

    def strike(self, number: int) -> bool:
        """Whether the records of fault `number` are written; begins that if nobody did."""
        if number in self._written:
            return True
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._write, args=(number,), daemon=True)
            self._thread.start()
        return False

    def _write(self, number: int) -> None:
        draw = random.Random(f"{self._seed}.{number}")
        with (
            suppress(StreamsError),  # the broker is away: it is tried again
            open_bus(self._config) as bus,
            bus.producer("vandal") as producer,
        ):
            for topic in TOPICS:
                newest = () if topic is SCHEMAS else _newest(bus, topic.name)
                producer.commit([_unreadable(raw, draw) for raw in newest])
            self._written.add(number)


def _newest(bus: Bus, topic: str) -> Sequence[RawRecord]:
    begins = bus.beginnings(topic)
    offsets = {
        partition: max(begins[partition], end - RECORDS_PER_TOPIC)
        for partition, end in bus.ends(topic).items()
    }
    with bus.reader(offsets) as reader:
        return reader.poll(100, READ_S)[-RECORDS_PER_TOPIC:]


def _unreadable(raw: RawRecord, draw: random.Random) -> Outgoing:
    """A copy that no decoder takes: what it would take is another event, and no damage."""
    value = bytes(raw.value)
    with suppress(DecodeError):
        while True:
            value = damaged(bytes(raw.value), draw)
            decode(value)
    return Outgoing(
        topic=raw.position.topic,
        key=raw.key,
        value=[value],
        headers=raw.headers,
        partition=raw.position.partition,
    )
