"""Where each record of a recording lies: one SQLite file, derived from the container files.

SQLite, because a recording is looked into by id, step, version, time, offset and worst value, with
constant memory, also while it is written; and because anybody can ask it with a client of theirs.
Its transaction is also the recording's: file sizes and positions in it say up to where the
container files count.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from rlstreams.streams.log.record import Partition, Position
from rlstreams.streams.recording.container import Place
from rlstreams.streams.recording.envelope import Kind
from rlstreams.streams.recording.errors import DamagedError, RecordingError
from rlstreams.streams.recording.facts import Facts, TrainedFact

INDEX_FILE = "index.sqlite"
_SCHEMA = """
CREATE TABLE files (
    file INTEGER PRIMARY KEY, name TEXT UNIQUE NOT NULL, topic TEXT NOT NULL,
    partition INTEGER NOT NULL, event TEXT NOT NULL, fingerprint TEXT NOT NULL,
    size_bytes INTEGER NOT NULL, num_records INTEGER NOT NULL);
CREATE TABLE records (
    file INTEGER NOT NULL, "offset" INTEGER NOT NULL,
    block_at INTEGER NOT NULL, place INTEGER NOT NULL,
    timestamp_ms INTEGER NOT NULL, size_bytes INTEGER NOT NULL,
    group_id TEXT, sample INTEGER, attempt INTEGER, purpose TEXT, step INTEGER,
    version INTEGER, oldest_version INTEGER, reward REAL, mismatch REAL, row INTEGER,
    PRIMARY KEY (file, "offset")) WITHOUT ROWID;
CREATE INDEX by_id ON records (group_id, sample) WHERE group_id IS NOT NULL;
CREATE INDEX by_step ON records (step) WHERE step IS NOT NULL;
CREATE INDEX by_version ON records (version) WHERE version IS NOT NULL;
CREATE INDEX by_time ON records (timestamp_ms);
CREATE TABLE trained (
    group_id TEXT NOT NULL, sample INTEGER NOT NULL, step INTEGER NOT NULL,
    partition INTEGER NOT NULL, "offset" INTEGER NOT NULL, staleness INTEGER NOT NULL,
    PRIMARY KEY (group_id, sample, step)) WITHOUT ROWID;
CREATE INDEX trained_by_step ON trained (step);
CREATE TABLE positions (
    topic TEXT NOT NULL, partition INTEGER NOT NULL,
    first INTEGER NOT NULL, next INTEGER NOT NULL, PRIMARY KEY (topic, partition));
"""
_COLUMNS = (
    'r.file, r."offset", r.block_at, r.place, r.timestamp_ms, r.size_bytes, r.group_id, r.sample,'
    " r.attempt, r.purpose, r.step, r.version, r.oldest_version, r.reward, r.mismatch, r.row"
)
_BATCH = 1000
# SQLite holds any type in any column: a file that was changed is found out before it is believed.
_FITS = {
    "i": (int,),
    "t": (str,),
    "n": (int, type(None)),
    "o": (str, type(None)),
    "r": (int, float, type(None)),
}
_ENTRY = "iiiiii" + "onnonnnrrn" + "tit"
_BUSY_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexedFile:
    """One container file, as far as it counts."""

    number: int
    kind: Kind
    size_bytes: int
    num_records: int

    @property
    def name(self) -> str:
        """Relative to the recording's folder."""
        return self.kind.file_name


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One record: where it lies, and what is known of it without reading it."""

    file: int
    position: Position
    event: str  # the event's name, or "bytes"
    place: Place
    timestamp_ms: int
    size_bytes: int  # of its value
    facts: Facts


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """What was read of one partition: from `first` up to, not including, `next`."""

    first: int
    next: int


class KnownBlock(NamedTuple):
    """One block of a container file."""

    num_records: int
    first: int  # offset of its first record


class Index:
    """The index of one recording.

    Args:
        path: of the SQLite file.
        writable: made if it is not there; otherwise it is only read.

    Raises:
        DamagedError: it is not there, or no index.
    """

    def __init__(self, path: Path, *, writable: bool = False) -> None:
        self._path = path
        mode = "rwc" if writable else "ro"
        try:
            self._db = sqlite3.connect(
                f"{path.resolve().as_uri()}?mode={mode}",
                uri=True,
                timeout=_BUSY_S,
                isolation_level=None,
                check_same_thread=False,  # one thread at a time; a notebook may have several
            )
            if writable:
                # What a process wrote outlives it. After a power cut the index is made anew from
                # the files; a live run on the same disk is not made to wait for it.
                self._db.execute("PRAGMA synchronous = OFF")
                self._db.execute("PRAGMA journal_mode = DELETE")
            tables = list(self._rows("SELECT name FROM sqlite_master"))
            if not tables and writable:
                self._db.executescript(f"BEGIN;{_SCHEMA}COMMIT;")
            elif ("records",) not in tables:
                raise DamagedError(f"{path.name} is no index of a recording")
        except sqlite3.Error as err:
            raise DamagedError(f"{path.name} cannot be read: {err}") from err

    # writing

    def add_file(self, kind: Kind) -> int:
        """A number for a new file."""
        cursor = self._write(
            "INSERT INTO files (name, topic, partition, event, fingerprint, size_bytes,"
            " num_records) VALUES (?, ?, ?, ?, ?, 0, 0)",
            (kind.file_name, *kind.partition, kind.event, kind.fingerprint),
        )
        assert cursor.lastrowid is not None
        return cursor.lastrowid

    def forget_file(self, number: int) -> None:
        """A file that never held anything."""
        self._write("DELETE FROM files WHERE file = ?", (number,))

    def begin(self) -> None:
        """Begin the transaction of one commit."""
        self._write("BEGIN IMMEDIATE")

    def commit(self) -> None:
        """End it."""
        self._write("COMMIT")

    def rollback(self) -> None:
        """End it as if it had not been."""
        if self._db.in_transaction:
            self._write("ROLLBACK")

    def add_records(self, rows: Iterable[tuple[object, ...]]) -> None:
        """Rows as `row_of` makes them."""
        self._write_all(f"INSERT OR REPLACE INTO records VALUES ({_marks(16)})", rows)

    def add_trained(self, facts: Iterable[TrainedFact]) -> None:
        """Samples of steps; of two steps of one number the first one stays."""
        rows = [(f.group_id, f.sample, f.step, f.partition, f.offset, f.staleness) for f in facts]
        self._write_all(f"INSERT OR IGNORE INTO trained VALUES ({_marks(6)})", rows)

    def set_file(self, number: int, size_bytes: int, num_records: int) -> None:
        """Up to where a file counts."""
        self._write(
            "UPDATE files SET size_bytes = ?, num_records = ? WHERE file = ?",
            (size_bytes, num_records, number),
        )

    def set_spans(self, spans: Mapping[Partition, Span]) -> None:
        """Up to where the log was read."""
        rows = [(*partition, span.first, span.next) for partition, span in spans.items()]
        self._write_all(f"INSERT OR REPLACE INTO positions VALUES ({_marks(4)})", rows)

    # reading

    def files(self) -> list[IndexedFile]:
        """Every container file, by name."""
        found = self._rows(
            "SELECT file, topic, partition, event, fingerprint, size_bytes, num_records"
            " FROM files ORDER BY topic, partition, event, fingerprint",
            shape="itittii",
        )
        return [
            IndexedFile(
                number=number,
                kind=Kind(Partition(topic, partition), event, print_),
                size_bytes=size,
                num_records=records,
            )
            for number, topic, partition, event, print_, size, records in found
        ]

    def spans(self) -> dict[Partition, Span]:
        """What was read of each partition."""
        found = self._rows("SELECT topic, partition, first, next FROM positions", shape="tiii")
        return {Partition(t, p): Span(first=first, next=next_) for t, p, first, next_ in found}

    def at(self, position: Position) -> Entry | None:
        """The record at a position of the recorded log."""
        where = 'f.topic = ? AND f.partition = ? AND r."offset" = ?'
        return next(self.entries(where, position), None)

    def by_id(self, group_id: str, sample: int | None = None, topic: str = "") -> list[Entry]:
        """Every record of a sample, or of a group, by topic, partition and offset."""
        where, values = "r.group_id = ?", [group_id]
        if sample is not None:
            where, values = f"{where} AND r.sample = ?", [*values, sample]  # type: ignore[list-item]
        if topic:
            where, values = f"{where} AND f.topic = ?", [*values, topic]
        return list(self.entries(f'{where} ORDER BY f.topic, f.partition, r."offset"', values))

    def trained(
        self, *, step: int | None = None, group_id: str = "", sample: int | None = None
    ) -> list[TrainedFact]:
        """What steps trained on: of a step, or of a group, or of one sample."""
        wanted = {"step": step, "group_id": group_id or None, "sample": sample}
        given = {name: value for name, value in wanted.items() if value is not None}
        where = " AND ".join(f"{name} = ?" for name in given) or "1"
        found = self._rows(
            'SELECT group_id, sample, step, partition, "offset", staleness FROM trained'
            f" WHERE {where} ORDER BY step, group_id, sample",
            list(given.values()),
            "tiiiii",
        )
        names = ("group_id", "sample", "step", "partition", "offset", "staleness")
        return [TrainedFact(**dict(zip(names, row, strict=True))) for row in found]

    def entries(self, where: str = "1", values: Sequence[object] = ()) -> Iterator[Entry]:
        """Records that a condition in SQL picks, with `r` the table records and `f` files.

        `entries("r.event = ? ORDER BY r.mismatch DESC LIMIT 10", ...)`; values belong into
        `values`, never into the text. Memory is constant however many there are.
        """
        found = self._rows(
            f"SELECT {_COLUMNS}, f.topic, f.partition, f.event"
            f" FROM records r JOIN files f ON f.file = r.file WHERE {where}",
            values,
            _ENTRY,
        )
        return map(_entry, found)

    def count(self, where: str = "1", values: Sequence[object] = ()) -> int:
        """How many records a condition picks, as for `entries`."""
        ((count,),) = self._rows(
            f"SELECT COUNT(*) FROM records r JOIN files f ON f.file = r.file WHERE {where}", values
        )
        return int(count)

    def offsets_since(self, at_ms: int) -> dict[Partition, int]:
        """First offset of each partition with a timestamp of `at_ms` or later."""
        found = self._rows(
            'SELECT f.topic, f.partition, MIN(r."offset") FROM records r'
            " JOIN files f ON f.file = r.file WHERE r.timestamp_ms >= ?"
            " GROUP BY f.topic, f.partition",
            [at_ms],
            "tii",
        )
        return {Partition(topic, number): offset for topic, number, offset in found}

    def blocks(self, file: int) -> list[int]:
        """Where the blocks of a file begin, lowest first."""
        text = "SELECT DISTINCT block_at FROM records WHERE file = ? ORDER BY block_at"
        return [row[0] for row in self._rows(text, [file], "i")]

    def known_blocks(self, file: int) -> dict[int, KnownBlock]:
        """The blocks of a file by the byte at which they begin."""
        # Beside MIN, SQLite gives the other columns of the row that has it.
        text = (
            'SELECT block_at, COUNT(*), MIN(place), "offset" FROM records WHERE file = ?'
            " GROUP BY block_at"
        )
        found = self._rows(text, [file], "iiii")
        return {at: KnownBlock(num, first) for at, num, _, first in found}

    def time_span(self) -> tuple[int, int] | None:
        """Timestamps of the first and the last record, milliseconds."""
        text = "SELECT MIN(timestamp_ms), MAX(timestamp_ms) FROM records"
        ((first, last),) = self._rows(text, shape="nn")
        return None if first is None else (first, last)

    def check(self) -> str:
        """What SQLite finds wrong with its file, or ""."""
        found = [str(row[0]) for row in self._rows("PRAGMA quick_check")]
        return "" if found == ["ok"] else "; ".join(found)

    def _rows(
        self, text: str, values: Sequence[object] = (), shape: str = ""
    ) -> Iterator[tuple[Any, ...]]:
        """Rows of a query; with a `shape`, of columns of these types: `_FITS`."""
        good: set[tuple[type, ...]] = set()
        try:
            cursor = self._db.execute(text, values)
            while rows := cursor.fetchmany(_BATCH):
                for row in rows:
                    types = tuple(map(type, row))
                    if shape and types not in good:
                        if not all(t in _FITS[c] for t, c in zip(types, shape, strict=True)):
                            raise self._damaged(f"{row!r} is no row of an index")
                        good.add(types)
                    yield row
        except (sqlite3.Error, UnicodeDecodeError) as err:
            if getattr(err, "sqlite_errorcode", None) == sqlite3.SQLITE_ERROR:
                raise DamagedError(f"{self._path.name}: {err}") from err  # the condition's fault
            raise self._damaged(str(err)) from err

    def _damaged(self, why: str) -> DamagedError:
        return DamagedError(
            f"{self._path.name} cannot be read: {why}; remove it: it is made anew from the "
            "container files"
        )

    def _write(self, text: str, values: Sequence[object] = ()) -> sqlite3.Cursor:
        with self._written():
            return self._db.execute(text, values)

    def _write_all(self, text: str, rows: Iterable[Sequence[object]]) -> None:
        with self._written():
            self._db.executemany(text, rows)

    @contextmanager
    def _written(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as err:
            raise RecordingError(f"{self._path} cannot be written: {err}") from err

    def close(self) -> None:
        """Release the file; idempotent."""
        self._db.close()


def usable_index(path: Path) -> Index:
    """An index to read, whose files and positions can be.

    Raises:
        DamagedError: as `Index`, or one of these cannot be read.
    """
    index = Index(path)
    try:
        index.files()
        index.spans()
    except DamagedError:
        index.close()
        raise
    return index


def row_of(
    file: int, offset: int, place: Place, timestamp_ms: int, size_bytes: int, facts: Facts
) -> tuple[object, ...]:
    """A record as a row for `add_records`."""
    return (
        *(file, offset, *place, timestamp_ms, size_bytes),
        *(facts.group_id, facts.sample, facts.attempt, facts.purpose, facts.step, facts.version),
        *(facts.oldest_version, facts.reward, facts.mismatch, facts.row),
    )


def _entry(row: tuple[Any, ...]) -> Entry:
    file, offset, block_at, place, timestamp_ms, size_bytes, *rest = row
    *columns, topic, partition, event = rest
    names = Facts.__slots__
    return Entry(
        file=file,
        position=Position(topic, partition, offset),
        event=event,
        place=Place(block_at, place),
        timestamp_ms=timestamp_ms,
        size_bytes=size_bytes,
        facts=Facts(**dict(zip(names, columns, strict=True))),
    )


def _marks(count: int) -> str:
    return ", ".join("?" * count)
