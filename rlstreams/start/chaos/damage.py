"""Damage to what the log carries: records that nobody can read, and a disk without room."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from rlstreams.schemas import DecodeError, decode
from rlstreams.streams.log.bus import Bus
from rlstreams.streams.log.errors import ConfigError, StreamsError
from rlstreams.streams.log.record import Outgoing, RawRecord
from rlstreams.streams.log.topics import SCHEMAS, TOPICS
from rlstreams.workers.bootstrap.parts import open_bus
from rlstreams.workers.config.run import RunConfig

RECORDS_PER_TOPIC = 6
LARGEST_DISK = 4 << 30  # bytes; a larger one is shared with what is not the run's
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


def filled(folder: Path) -> Path:
    """A new file that takes all room on the disk of `folder`; room is there again without it."""
    ballast = folder / "ballast"
    with ballast.open("wb", buffering=0) as file:
        for size in (1 << 24, 1 << 20, 1 << 16, 1 << 12):
            with suppress(OSError):  # until it fails
                while True:
                    file.write(bytes(size))
    return ballast


def check_disk(folder: Path) -> None:
    """That the disk of a run's folder may be filled.

    Raises:
        ConfigError: it is so large that it is not the run's alone.
    """
    disk = os.statvfs(next(path for path in (folder, *folder.parents) if path.exists()))
    size = disk.f_blocks * disk.f_frsize
    if size > LARGEST_DISK:
        raise ConfigError(
            f"--roles names the disk, but that of {folder} holds {size / 2**30:.0f} GiB: put "
            f"run.dir on one of its own of at most {LARGEST_DISK / 2**30:.0f} GiB, e.g. a tmpfs"
        )
