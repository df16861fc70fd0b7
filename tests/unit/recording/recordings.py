"""Small recordings on disk, and what they were made from."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from rlstreams.schemas import DecodeError, decode, encode
from rlstreams.schemas.events import Event
from rlstreams.streams.log.record import Partition, Position, RawRecord
from rlstreams.streams.log.topics import TOPICS
from rlstreams.streams.recording import RecordedTopic, RecordingManifest, RecordingWriter
from tests import factories

TOPIC_OF = {event.__name__: topic.name for topic in TOPICS for event in topic.events}


def manifest(run: str = "r") -> RecordingManifest:
    """Of a run with every topic."""
    return RecordingManifest(
        run=run,
        started_at_ms=factories.NOW_MS,
        cluster_id="c1",
        topics={name: RecordedTopic(id=f"id-{name}", partitions=2) for name in TOPIC_OF.values()},
    )


def raw_of(
    event: Event,
    offset: int,
    *,
    partition: int = 0,
    parts: int = 1,
    timestamp_ms: int = factories.NOW_MS,
    headers: dict[str, bytes] | None = None,
) -> RawRecord:
    """A record as a reader delivers it."""
    topic = TOPIC_OF[type(event).__name__]
    return RawRecord(
        position=Position(topic, partition, offset),
        offsets=tuple(range(offset, offset + parts)),
        key=b"k\x00" + str(offset).encode(),
        value=b"".join(encode(event)),
        headers={"rlstreams-id": b"7/1/0", "other": b""} if headers is None else headers,
        timestamp_ms=timestamp_ms,
    )


def opaque(offset: int, value: bytes = b"\xc3\x01 not an event", topic: str = "steps") -> RawRecord:
    """A record that is no event."""
    return RawRecord(
        position=Position(topic, 0, offset), offsets=(offset,), key=b"", value=value, timestamp_ms=1
    )


def trajectories(count: int, *, first: int = 0) -> Iterator[RawRecord]:
    """Samples 0 to 3 of groups 0, 1, 2, ..., alternating between two partitions."""
    for number in range(first, first + count):
        event = factories.trajectory(
            group_id=str(number // 4), sample=number % 4, reward=float(number % 3)
        )
        when = factories.NOW_MS + number
        yield raw_of(event, number // 2, partition=number % 2, timestamp_ms=when)


def positions_after(raws: Iterable[RawRecord]) -> dict[Partition, int]:
    """Where a reader stands that delivered these."""
    after: dict[Partition, int] = {}
    for raw in raws:
        after[raw.partition] = max(after.get(raw.partition, 0), raw.offsets[-1] + 1)
    return after


def record(
    folder: Path, raws: Iterable[RawRecord], *, seal: bool = True, each: int = 0
) -> list[RawRecord]:
    """Write a recording; with `each`, a file of its own for each so many records."""
    raws = list(raws)
    with RecordingWriter(folder, manifest()) as writer:
        for number, raw in enumerate(raws, 1):
            try:
                event = decode(raw.value)
            except DecodeError:
                event = None
            writer.append(raw, event)
            if each and number % each == 0:
                writer.commit(positions_after(raws[:number]), {})
        writer.commit(positions_after(raws), dict.fromkeys(positions_after(raws), 0))
        if seal:
            writer.seal()
    return raws


def change_manifest(folder: Path, **changes: object) -> None:
    """Edit the manifest by hand; its own hash no longer fits."""
    path = folder / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text("utf-8")) | changes), "utf-8")
