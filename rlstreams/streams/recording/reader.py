"""Opens a recording: typed records in order, or any one of them by position, group or key.

    with Recording(Path("recordings/demo")) as recording:
        for record in recording.events(ScoredTrajectory):
            print(record.position, record.event.trajectory.reward)
        raw = recording.at(Position("steps", 0, 17))

Files that are missing or cannot be opened are named in `problems`; the others are read. A page
that was changed raises `DamagedError` where it is read.
"""

from __future__ import annotations

import heapq
import itertools
import struct
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache, lru_cache
from pathlib import Path
from typing import TypeVar

import pyarrow as pa
import pyarrow.compute as pc

from rlstreams.schemas import EVENTS, DecodeError, fingerprint, schema_text
from rlstreams.schemas.avro import fingerprint_of_foreign
from rlstreams.schemas.events import Event
from rlstreams.streams.digests import file_sha256
from rlstreams.streams.log.bus import Closing
from rlstreams.streams.log.codec import decoded
from rlstreams.streams.log.record import Partition, Position, RawRecord, Record
from rlstreams.streams.log.text import counted
from rlstreams.streams.log.topics import SCHEMAS, TOPICS
from rlstreams.streams.recording.manifest import (
    SUFFIX,
    DamagedError,
    ForeignFileError,
    NotRecordedError,
    RecordedFile,
    RecordingError,
    RecordingManifest,
    load,
)
from rlstreams.streams.recording.table import (
    RECORD,
    RowGroup,
    read_footer,
    read_group,
    records_of,
)

E = TypeVar("E", bound=Event)


@cache
def own_prints() -> frozenset[bytes]:
    """Fingerprints of this release's schemas."""
    return frozenset(fingerprint(schema_text(cls.__name__)) for cls in EVENTS)


_HELD_GROUPS = 8  # row groups kept in memory, the last used


class Recording(Closing):
    """A recording, opened for reading, even while it is being written.

    Raises:
        ForeignFileError: no recording, or one of another format.
        DamagedError: the manifest was changed.
    """

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        self.manifest: RecordingManifest = load(self.folder)
        self.schemas: dict[bytes, str] = {}  # of other releases, by fingerprint: for `decode`
        self.spans: dict[Partition, tuple[int, int]] = {}  # recorded: first and next offset
        self.groups: list[RowGroup] = []
        self.num_by_file: Counter[str] = Counter()  # records of each file, of each topic
        self.num_by_topic: Counter[str] = Counter()
        self.problems: list[str] = []  # missing or unusable files, a sentence each
        self._group = lru_cache(maxsize=_HELD_GROUPS)(self._read_group)
        for name, known in self._names().items():
            try:
                self._open(name, known)
            except RecordingError as err:
                held = f" ({counted(known.num_records, 'record')})" if known else ""
                self.problems.append(f"{err}{held}")
        for topic, found in self.manifest.topics.items():
            for number, first in found.first.items():  # a sealed recording's; files may be missing
                self.spans[Partition(topic, int(number))] = first, found.next[number]
        self._by_partition: dict[Partition, list[RowGroup]] = {}
        for group in self.groups:
            self._by_partition.setdefault(group.partition, []).append(group)
            self.num_by_file[group.file] += group.num_records
            self.num_by_topic[group.partition.topic] += group.num_records
        self.schemas |= self._published()

    @property
    def num_records(self) -> int:
        """Number of records that can be read."""
        return self.num_by_file.total()

    @property
    def time_span(self) -> tuple[int, int] | None:
        """Times of the first and the last record, milliseconds."""
        times = [at for group in self.groups for at in group.times_ms]
        return (min(times), max(times)) if times else None

    def records(
        self,
        topics: Collection[str] = (),
        *,
        start: Mapping[Partition, int] | None = None,
    ) -> Iterator[RawRecord]:
        """Yield records of these topics (none named: all) in the order of their timestamps.

        Within a partition they come as they were delivered, whatever their timestamps; ties are
        broken by topic and partition. Memory is a row group of each partition.

        Args:
            topics: names without the run's prefix.
            start: only these partitions, from these offsets on.

        Raises:
            DamagedError: bytes were changed.
        """
        partitions = [p for p in sorted(self._by_partition) if not topics or p.topic in topics]
        if start is not None:
            partitions = [p for p in partitions if p in start]
        streams = [_timed(self.partition(p, start=(start or {}).get(p, 0))) for p in partitions]
        for _, raw in heapq.merge(*streams, key=lambda item: item[0]):
            yield raw

    def partition(self, partition: Partition, *, start: int = 0) -> Iterator[RawRecord]:
        """Yield one partition's records from offset `start` on, as they were delivered."""
        for group in self._by_partition.get(partition, ()):
            if group.offsets[1] >= start:
                for raw in records_of(read_group(self.folder, group), partition):
                    if raw.position.offset >= start:
                        yield raw

    def events(self, kind: type[E]) -> Iterator[Record[E]]:
        """Yield every event of one kind, in the order of `records`; pass by records of no event."""
        for raw in self.records([topic.name for topic in TOPICS if kind in topic.events]):
            event = self.event(raw)
            if isinstance(event, kind):
                yield Record(event=event, raw=raw)

    def event(self, raw: RawRecord) -> Event | None:
        """Return the record's event; None: it is no event of ours."""
        try:
            return self.decoded(raw).event
        except DecodeError:
            return None

    def decoded(self, raw: RawRecord) -> Record[Event]:
        """Decode a record, also under a schema of another release.

        Raises:
            schemas.DecodeError: it is no event, or its schema was not known when it was recorded.
        """
        return decoded(raw, self.schemas)

    def at(self, position: Position) -> RawRecord:
        """Return the record at a position of the recorded log.

        Raises:
            NotRecordedError: there is none; names the recorded offsets of that partition.
            DamagedError: bytes were changed.
        """
        topic, number, offset = position
        for group in self._by_partition.get(Partition(topic, number), ()):
            if group.offsets[0] <= offset <= group.offsets[1]:
                found = self._group(group).get(offset)
                if found is not None:
                    return found
        raise NotRecordedError(f"{position} is not in {self.folder}: {self._there(position)}")

    def keyed(self, topic: str, keys: Collection[bytes]) -> Iterator[RawRecord]:
        """Yield the records of a topic with one of these keys; only their row groups are read."""
        wanted = _array_of(sorted(keys))
        for partition, groups in sorted(self._by_partition.items()):
            for group in groups if partition.topic == topic else ():
                if _may_hold(group, keys):
                    found = pc.is_in(read_group(self.folder, group, ["key"])["key"], wanted)
                    if pc.any(found).as_py():
                        table = read_group(self.folder, group).filter(found)
                        yield from records_of(table, partition)

    def close(self) -> None:
        """Drop the row groups in memory; files are open only while they are read."""
        self._group.cache_clear()

    def _names(self) -> dict[str, RecordedFile | None]:
        """Return the files that should be there, with their entries if sealed; note strangers."""
        names = {path.name for path in self.folder.glob(f"*{SUFFIX}")}
        known: dict[str, RecordedFile | None] = {
            file.name: file for file in self.manifest.files if file.num_records
        }
        if not self.manifest.is_sealed:  # files are numbered without a gap
            numbers = [int(name[: -len(SUFFIX)]) for name in names if name[:6].isdecimal()]
            known = {f"{n:06}{SUFFIX}": None for n in range(max(numbers, default=-1) + 1)}
        for stranger in sorted(names - known.keys()):
            self.problems.append(f"{self.folder / stranger} is no file of this recording")
        return dict(sorted(known.items()))

    def _open(self, name: str, known: RecordedFile | None) -> None:
        path = self.folder / name
        footer, groups = read_footer(path)
        if footer.recording != self.manifest.id:
            raise ForeignFileError(
                f"{path} is of another recording, of run {footer.run!r}; this one is of "
                f"{self.manifest.run!r}"
            )
        if footer.name != name:
            raise ForeignFileError(f"{path} is {footer.name} under another name")
        size_bytes = path.stat().st_size
        if known is not None and known.size_bytes != size_bytes:
            raise ForeignFileError(
                f"{path} has {size_bytes} bytes, and had {known.size_bytes} when the recording "
                "was sealed"
            )
        self.schemas |= {fingerprint_of_foreign(text) or b"": text for text in footer.schemas}
        self.spans |= {Partition(t, n): (a, b) for t, n, a, b in footer.positions}
        self.groups += groups

    def _published(self) -> dict[bytes, str]:
        """Schema texts in the recorded topic `schemas`, as far as it can be read, but for ours.

        A footer lacks those of the release that recorded: to us it may be another one.
        """
        found: dict[bytes, str] = {}
        with suppress(RecordingError):  # `verify` names the file
            for raw in self.records([SCHEMAS.name]):
                text = bytes(raw.value).decode("utf-8", "replace")
                if print_ := fingerprint_of_foreign(text):
                    found[print_] = text
        return {print_: text for print_, text in found.items() if print_ not in own_prints()}

    def _read_group(self, group: RowGroup) -> dict[int, RawRecord]:
        """Return the records of a row group by offset."""
        records = records_of(read_group(self.folder, group), group.partition)
        return {raw.position.offset: raw for raw in records}

    def _there(self, position: Position) -> str:
        partition = Partition(position.topic, position.partition)
        span = self.spans.get(partition)
        if span is None:
            recorded = ", ".join(sorted(self.num_by_topic)) or "nothing"
            return f"nothing of {partition} was recorded, only of {recorded}"
        num = sum(group.num_records for group in self._by_partition.get(partition, ()))
        there = f"{counted(num, 'record')} of {partition}, read from offset {span[0]} to {span[1]}"
        return "; ".join([there, *self.problems[:1]])


def _array_of(keys: Sequence[bytes]) -> pa.BinaryArray:
    """Make an array from buffers: `pyarrow.array` would import pandas, for half a second."""
    ends = list(itertools.accumulate(map(len, keys), initial=0))
    offsets = pa.py_buffer(struct.pack(f"={len(ends)}i", *ends))
    values = pa.py_buffer(b"".join(keys))
    return pa.Array.from_buffers(pa.binary(), len(keys), [None, offsets, values])


def _may_hold(group: RowGroup, keys: Collection[bytes]) -> bool:
    return group.keys is None or any(group.keys[0] <= key <= group.keys[1] for key in keys)


def _timed(records: Iterable[RawRecord]) -> Iterator[tuple[tuple[int, str, int], RawRecord]]:
    """Yield records with their sort keys across partitions: time never goes back within one."""
    now_ms = 0
    for raw in records:
        now_ms = max(now_ms, raw.timestamp_ms)
        yield (now_ms, raw.position.topic, raw.position.partition), raw


def verify(folder: Path) -> list[str]:
    """Return each difference from the bytes as written, a sentence each; change nothing.

    Compares hashes, page checksums and events.

    Raises:
        ForeignFileError: no recording, or one of another format.
    """
    try:
        recording = Recording(folder)
    except DamagedError as err:
        return [str(err)]
    problems = [*recording.problems]
    for group in recording.groups:
        try:
            table = read_group(folder, group, (*RECORD, "event"))
        except DamagedError as err:
            problems.append(str(err))
            continue
        names = table["event"].to_pylist()
        for raw, name in zip(records_of(table, group.partition), names, strict=True):
            try:
                recording.decoded(raw)
            except DecodeError as err:
                if name is not None:
                    problems.append(f"{raw.position} in {group.file} does not decode: {err}")
    for file in recording.manifest.files:
        path = folder / file.name
        if not any(str(path) in problem for problem in problems):
            if not path.exists():
                problems.append(f"{path} is missing")
            elif file_sha256(path) != file.sha256:
                problems.append(f"{path}: bytes were changed: its hash is not the manifest's")
    return [*dict.fromkeys(problems)]
