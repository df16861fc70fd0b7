"""Opens a recording: typed records in order, or any one of them by id, step or position.

    with Recording(Path("recordings/demo")) as recording:
        for record in recording.events(ScoredTrajectory):
            print(record.position, record.event.trajectory.reward)
        raw = recording.at(Position("steps", 0, 17))

A recording that was cut opens up to its last whole block, and `problems` says what is missing.
"""

from __future__ import annotations

import heapq
import tempfile
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from rlstreams.schemas import DecodeError
from rlstreams.schemas.events import Event
from rlstreams.streams.log.bus import Closing
from rlstreams.streams.log.codec import decoded
from rlstreams.streams.log.record import Partition, Position, RawRecord, Record
from rlstreams.streams.recording.ahead import read_ahead
from rlstreams.streams.recording.container import ContainerReader
from rlstreams.streams.recording.envelope import OPAQUE, Kind, event_schema, records_of
from rlstreams.streams.recording.errors import (
    DamagedError,
    ForeignFileError,
    NotRecordedError,
    RecordingError,
)
from rlstreams.streams.recording.index import (
    INDEX_FILE,
    Entry,
    Index,
    IndexedFile,
    KnownBlock,
    usable_index,
)
from rlstreams.streams.recording.manifest import Manifest, load
from rlstreams.streams.recording.missing import cut_text, num_text, unlike_manifest
from rlstreams.streams.recording.rebuild import rebuild
from rlstreams.streams.recording.sequence import Follower, distinct

E = TypeVar("E", bound=Event)
_BLOCKS_HELD = 32
_THREADS = 2  # that decompress ahead


class Recording(Closing):
    """A recording, opened for reading; also one that is still being written.

    Args:
        folder: of the recording.
        on_damage: told of each damaged block that iteration passes by; without it, iteration
            raises `DamagedError` there.

    Raises:
        ForeignFileError: no recording, or one of a newer format.
        DamagedError: the manifest was changed, or there is neither an index nor a file to make
            one from.
    """

    def __init__(
        self, folder: Path | str, *, on_damage: Callable[[DamagedError], None] | None = None
    ) -> None:
        self.folder = Path(folder)
        self.manifest: Manifest = load(self.folder)
        self._on_damage = on_damage
        self._pool = ThreadPoolExecutor(_THREADS, "recording")  # its threads start when asked
        self._scratch: tempfile.TemporaryDirectory[str] | None = None
        self._losses: list[str] = []
        self._notes: list[str] = []
        self.index = self._opened_index()
        self._readers: dict[int, ContainerReader] = {}
        self._known: dict[int, Mapping[int, KnownBlock]] = {}  # by file
        self._held: OrderedDict[tuple[int, int], list[RawRecord]] = OrderedDict()
        self.schemas: dict[bytes, str] = {}  # writers' schemas by fingerprint, for `decode`
        all_files = [file for file in self.index.files() if file.size_bytes]
        self._by_number = {file.number: file for file in all_files}
        # Those that can be read, at least in part.
        self.files: tuple[IndexedFile, ...] = tuple(f for f in all_files if self._is_usable(f))
        if self.manifest.is_sealed:
            told = {loss.split()[0].rstrip(":") for loss in self._losses}
            self._losses += [
                text
                for text in unlike_manifest(self.folder, self.manifest, all_files)
                if text.split()[0] not in told
            ]

    @property
    def problems(self) -> tuple[str, ...]:
        """What is missing, one sentence each; empty if everything that counts is there."""
        return (*self._notes, *self._losses)

    @property
    def is_whole(self) -> bool:
        """Whether no record is known to be missing: an index can be made anew, a record cannot."""
        return not self._losses

    @property
    def topics(self) -> tuple[str, ...]:
        """Topics of which there are records."""
        return tuple(sorted({file.kind.partition.topic for file in self.files}))

    @property
    def num_records(self) -> int:
        """Records that the index counts."""
        return sum(file.num_records for file in self.files)

    def records(
        self, topics: Collection[str] = (), *, start: Mapping[Partition, int] | None = None
    ) -> Iterator[RawRecord]:
        """Records of these topics (none named: all) in the order of their timestamps.

        Within a partition they come by offset, whatever their timestamps say; ties are broken by
        topic and partition. Memory is two blocks per file.

        Args:
            topics: names without the run's prefix.
            start: only these partitions, from these offsets on.

        Raises:
            DamagedError: a block was changed, and `on_damage` was not given.
        """
        partitions = {f.kind.partition for f in self.files}
        if topics:
            partitions = {p for p in partitions if p.topic in topics}
        if start is not None:
            partitions &= start.keys()
        streams = [
            _timed(self.partition(p, start=(start or {}).get(p, 0))) for p in sorted(partitions)
        ]
        for _, raw in heapq.merge(*streams, key=lambda item: item[0]):
            yield raw

    def partition(self, partition: Partition, *, start: int = 0) -> Iterator[RawRecord]:
        """One partition's records by offset, from offset `start` on."""
        files = [f for f in self.files if f.kind.partition == partition]
        streams = [self.file_records(file, start, self._on_damage) for file in files]
        if len(streams) == 1:
            return streams[0]
        return distinct(heapq.merge(*streams, key=lambda raw: raw.position.offset))

    def events(self, kind: type[E], topics: Collection[str] = ()) -> Iterator[Record[E]]:
        """Every event of one kind, as `records` orders them; what is no event is passed by."""
        names = {f.kind.partition.topic for f in self.files if f.kind.event == kind.__name__}
        for raw in self.records(names & set(topics) if topics else names):
            event = self.event(raw)
            if isinstance(event, kind):
                yield Record(event=event, raw=raw)

    def event(self, raw: RawRecord) -> Event | None:
        """The record's event, or None where it was no event when it was recorded either."""
        try:
            return self.decoded(raw).event
        except DecodeError:
            return None

    def decoded(self, raw: RawRecord) -> Record[Event]:
        """The record with its event, under the schema that its file holds.

        Raises:
            schemas.DecodeError: it was no event when it was recorded either.
        """
        return decoded(raw, self.schemas)

    def at(self, position: Position) -> RawRecord:
        """The record at a position of the recorded log.

        Raises:
            NotRecordedError: there is none; says what is there of that partition.
            DamagedError: its block is missing or was changed.
        """
        entry = self.index.at(position)
        if entry is None:
            raise NotRecordedError(f"{position} is not in {self.folder}: {self._there(position)}")
        return self.read(entry)

    def read(self, entry: Entry) -> RawRecord:
        """The record of an entry of the index.

        Raises:
            DamagedError: its block is missing or was changed.
        """
        held = self._block(entry.file, entry.place.block_at)
        if not 0 <= entry.place.number < len(held):
            raise DamagedError(f"{self.folder}: the index does not fit to {entry.position}")
        raw = held[entry.place.number]
        if raw.position != entry.position:
            raise DamagedError(f"{self.folder}: at the place of {entry.position} is {raw.position}")
        return raw

    def by_id(self, kind: type[E], group_id: str, sample: int | None = None) -> list[Record[E]]:
        """Events of a sample, or of a group, in the order of their partition."""
        found: list[Record[E]] = []
        for entry in self.index.by_id(group_id, sample):
            if entry.event == kind.__name__:
                record = self.decoded(self.read(entry))
                if isinstance(record.event, kind):
                    found.append(Record(event=record.event, raw=record.raw))
        return found

    def close(self) -> None:
        """Release the files; idempotent."""
        for reader in self._readers.values():
            reader.close()
        self._readers = {}
        self._pool.shutdown()
        self.index.close()
        if self._scratch is not None:
            self._scratch.cleanup()

    def _opened_index(self) -> Index:
        """The index, or one made anew from the files where it is missing or unusable."""
        try:
            return usable_index(self.folder / INDEX_FILE)
        except DamagedError as err:
            problem = str(err)
        self._scratch = tempfile.TemporaryDirectory(prefix="rlstreams-index-")
        made = Path(self._scratch.name) / INDEX_FILE
        self._losses += rebuild(self.folder, made)
        self._notes.append(f"{problem}; one was made anew from the container files")
        return Index(made)

    def _is_usable(self, file: IndexedFile) -> bool:
        """Look at a file's size and header; what is wrong goes to the problems."""
        path = self.folder / file.name
        if not path.exists():
            self._losses.append(f"{file.name} is missing: {num_text(file.num_records)}")
            return False
        try:
            reader = self._reader(file)
            if (found := Kind.of(reader.header, file.name)) != file.kind:
                raise DamagedError(f"{file.name}: its header says that it is {found.file_name}")
            run = reader.header.metadata.get("rlstreams.run", b"").decode("utf-8", "replace")
            if run != self.manifest.run:
                raise ForeignFileError(
                    f"{file.name} is of run {run!r}, the recording of {self.manifest.run!r}"
                )
            if found.event != OPAQUE:
                self.schemas[bytes.fromhex(found.fingerprint)] = event_schema(
                    reader, found.fingerprint
                )
        except RecordingError as err:
            self._losses.append(f"{err} ({num_text(file.num_records)})")
            return False
        if path.stat().st_size < file.size_bytes:
            self._losses.append(cut_text(self.index, file, path.stat().st_size))
        return True

    def _reader(self, file: IndexedFile) -> ContainerReader:
        reader = self._readers.get(file.number)
        if reader is None:
            reader = ContainerReader(self.folder / file.name, file.name)
            self._readers[file.number] = reader
        return reader

    def file_records(
        self,
        file: IndexedFile,
        start: int = 0,
        on_damage: Callable[[DamagedError], None] | None = None,
    ) -> Iterator[RawRecord]:
        """A file's records from offset `start` on, over a handle of its own."""
        reader = ContainerReader(self.folder / file.name, file.name)
        try:
            yield from self._walk(reader, file, start, on_damage)
        finally:
            reader.close()

    def _walk(
        self,
        reader: ContainerReader,
        file: IndexedFile,
        start: int,
        on_damage: Callable[[DamagedError], None] | None,
    ) -> Iterator[RawRecord]:
        at = self._first_block(file, start)
        # An index that was made from the files knows no other blocks than theirs.
        known = None if self._scratch is not None else self._known_blocks(file)
        follower = Follower(file.name, known)
        while at is not None and at < file.size_bytes:
            try:
                for block in read_ahead(self._pool, reader.blocks(at, file.size_bytes)):
                    at = block.end
                    records = records_of(block, file.kind, file.name)
                    for raw in follower.checked(block, records):
                        if raw.position.offset >= start:
                            yield raw
                at = None
            except DamagedError as err:
                error = self._explained(err, file)
                if on_damage is None:
                    raise error from err
                on_damage(error)
                at = self._block_after(file, err.at)

    def _known_blocks(self, file: IndexedFile) -> Mapping[int, KnownBlock]:
        """Asked for once: it takes a look at all rows of the file, and each seek needs them."""
        if file.number not in self._known:
            self._known[file.number] = self.index.known_blocks(file.number)
        return self._known[file.number]

    def _explained(self, error: DamagedError, file: IndexedFile) -> DamagedError:
        """The error, with the records that lie there."""
        entries = list(
            self.index.entries(
                'r.file = ? AND r.block_at = ? ORDER BY r."offset"', [file.number, error.at]
            )
        )
        if not entries:
            return error
        first, last = entries[0].position, entries[-1].position.offset
        return DamagedError(
            f"{error}: it held {num_text(len(entries))}, {first} to {last}", error.at
        )

    def _first_block(self, file: IndexedFile, start: int) -> int | None:
        if start <= 0:
            return 0
        where = 'r.file = ? AND r."offset" >= ? ORDER BY r."offset" LIMIT 1'
        entry = next(self.index.entries(where, [file.number, start]), None)
        return None if entry is None else entry.place.block_at

    def _block_after(self, file: IndexedFile, at: int) -> int | None:
        where = "r.file = ? AND r.block_at > ? ORDER BY r.block_at LIMIT 1"
        entry = next(self.index.entries(where, [file.number, at]), None)
        return None if entry is None else entry.place.block_at

    def _block(self, number: int, at: int) -> list[RawRecord]:
        """The records of one block; the last few are held."""
        key = (number, at)
        if key in self._held:
            self._held.move_to_end(key)
            return self._held[key]
        file = self._by_number[number]
        try:
            block = self._reader(file).block(at)
        except DamagedError as err:
            raise self._explained(err, file) from err
        self._held[key] = list(records_of(block, file.kind, file.name))
        if len(self._held) > _BLOCKS_HELD:
            self._held.popitem(last=False)
        return self._held[key]

    def _there(self, position: Position) -> str:
        topic, number, _ = position
        span = self.index.spans().get(Partition(topic, number))
        if span is None:
            recorded = ", ".join(self.topics) or "nothing"
            return f"nothing of {topic}[{number}] was recorded, only of {recorded}"
        where = "f.topic = ? AND f.partition = ?"
        num = self.index.count(where, [topic, number])
        return f"{num_text(num)} of {topic}[{number}], read from offset {span.first} to {span.next}"


def _timed(records: Iterable[RawRecord]) -> Iterator[tuple[tuple[int, str, int], RawRecord]]:
    """With what orders them across partitions: time never goes back within one."""
    now_ms = 0
    for raw in records:
        now_ms = max(now_ms, raw.timestamp_ms)
        yield (now_ms, raw.position.topic, raw.position.partition), raw
