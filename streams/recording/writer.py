"""Writes one recording, and goes on where a killed predecessor stopped.

`append` fills blocks; `commit` writes them out and then, in one transaction of the index, says up
to where files and positions count. What lies beyond that in a file is cut off by the next writer,
so a record is never there twice, and none is missing below the positions.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

from rlstreams.schemas.avro import fingerprint
from rlstreams.streams.log.bus import Closing
from rlstreams.streams.log.owner_lock import OwnedError, take
from rlstreams.streams.log.record import Partition, RawRecord
from rlstreams.streams.recording.container import ContainerWriter, read_header
from rlstreams.streams.recording.envelope import Described, Describer, Kind, spliced
from rlstreams.streams.recording.errors import DamagedError, RecordingError
from rlstreams.streams.recording.facts import TrainedFact, facts_of, trained_by
from rlstreams.streams.recording.index import INDEX_FILE, Index, Span, row_of
from rlstreams.streams.recording.manifest import (
    MANIFEST_FILE,
    Manifest,
    RecordedFile,
    RecordedTopic,
    load,
    save,
    sha256_of,
)

LOCK_FILE = ".writer.lock"


@dataclass(slots=True)
class _Open:
    """A container file that is written to."""

    number: int
    file: BinaryIO
    writer: ContainerWriter
    num_records: int
    is_dirty: bool = False


class RecordingWriter(Closing):
    """A recording in the making; one writer at a time holds it.

    Args:
        folder: made if it is not there; one with a recording is gone on with.
        manifest: of a new recording; of an old one its own stays in force.
        schemas: further writers' schemas, hexadecimal fingerprint -> text; may grow.

    Raises:
        RecordingError: the folder holds something else, a sealed recording, or another run's; or
            another process writes it, which is named.
    """

    def __init__(
        self, folder: Path, manifest: Manifest, schemas: dict[str, str] | None = None
    ) -> None:
        self.folder = folder
        self._schemas = {} if schemas is None else schemas
        self.describe = Describer(self._schemas)
        self._open: dict[Kind, _Open] = {}
        self._rows: list[tuple[object, ...]] = []
        self._trained: list[TrainedFact] = []
        self.num_records = 0
        _begun(folder, manifest)  # what is refused is left as it is
        folder.mkdir(parents=True, exist_ok=True)
        self._held = ExitStack()
        with ExitStack() as stack:
            stack.callback(os.close, _locked(folder))
            found = _begun(folder, manifest)  # another may have sealed it meanwhile
            self.is_resumed = found is not None
            self.manifest = found or manifest
            if found is None:
                save(manifest, folder)
            self._index = Index(folder / INDEX_FILE, writable=True)
            stack.callback(self._index.close)
            stack.callback(self._close_files)
            self.spans = self._index.spans()
            # Behind a record whose parts had not all come, others had: they are delivered again.
            self._written = {
                entry.position
                for partition, span in self.spans.items()
                for entry in self._index.entries(
                    'f.topic = ? AND f.partition = ? AND r."offset" >= ?', [*partition, span.next]
                )
            }
            for file in self._index.files():
                self._reopen(file.number, file.kind, file.size_bytes, file.num_records)
            self._held = stack.pop_all()

    def append(self, raw: RawRecord, described: Described | None = None) -> None:
        """Add one record; it counts from the next `commit` on. One that is there is passed by."""
        if raw.position in self._written:
            return
        described = described or self.describe(raw)
        kind = described.kind
        file = self._open.get(kind) or self._create(kind, described.schema)
        place = file.writer.append(spliced(raw, kind))
        file.num_records += 1
        file.is_dirty = True
        self.num_records += 1
        facts = facts_of(described.event)
        offset, size = raw.position.offset, len(raw.value)
        self._rows.append(row_of(file.number, offset, place, raw.timestamp_ms, size, facts))
        self._trained += trained_by(described.event)

    def learn(self, text: str) -> None:
        """Take note of a schema of another release: records to come are written under it."""
        self._schemas[fingerprint(text).hex()] = text

    def commit(self, positions: Mapping[Partition, int], first: Mapping[Partition, int]) -> None:
        """From here on everything appended counts.

        Args:
            positions: next offset to read, by partition.
            first: offset at which reading began; of partitions that are new here.
        """
        for file in self._open.values():
            if file.is_dirty:
                file.writer.flush()
        begun = {p: Span(first=first.get(p, at), next=at) for p, at in positions.items()}
        self.spans |= {
            p: replace(self.spans[p], next=span.next) if p in self.spans else span
            for p, span in begun.items()
        }
        self._index.begin()
        try:
            self._index.add_records(self._rows)
            self._index.add_trained(self._trained)
            for file in self._open.values():
                if file.is_dirty:
                    size = file.writer.size_bytes
                    self._index.set_file(file.number, size, file.num_records)
            self._index.set_spans(self.spans)
            self._index.commit()
        except BaseException:
            self._index.rollback()
            raise
        for file in self._open.values():
            file.is_dirty = False
        self._rows, self._trained = [], []

    def seal(self, *, extra: Manifest | None = None) -> Manifest:
        """Finish: everything synced, hashed and named in the manifest.

        Args:
            extra: a manifest with facts that became known meanwhile (hashes, configuration).
        """
        indexed = self._index.files()
        self._close_files()
        self._index.close()
        _sync(self.folder)
        files = [_recorded(self.folder, f.name, f.num_records) for f in indexed]
        files += [_recorded(self.folder, name, 0) for name in _others(self.folder)]
        counts: dict[str, int] = {}
        for entry in indexed:
            topic = entry.kind.partition.topic
            counts[topic] = counts.get(topic, 0) + entry.num_records
        base = extra or self.manifest
        self.manifest = replace(
            base,
            state="sealed",
            finished_at_ms=time.time_ns() // 1_000_000,
            files=sorted(files, key=lambda f: f.name),
            topics={
                name: replace(
                    topic,
                    num_records=counts.get(name, 0),
                    first={str(p.number): s.first for p, s in self._spans_of(name)},
                    next={str(p.number): s.next for p, s in self._spans_of(name)},
                )
                for name, topic in base.topics.items()
            },
        )
        save(self.manifest, self.folder)
        _fsync(self.folder)
        (self.folder / LOCK_FILE).unlink(missing_ok=True)  # nobody writes here any more
        self.close()
        return self.manifest

    def _spans_of(self, topic: str) -> list[tuple[Partition, Span]]:
        return [(p, span) for p, span in sorted(self.spans.items()) if p.topic == topic]

    def close(self) -> None:
        """Release files and lock; what was not committed is gone. Idempotent."""
        self._held.close()

    def _close_files(self) -> None:
        for file in self._open.values():
            file.file.close()
        self._open = {}

    def _create(self, kind: Kind, event_schema: str) -> _Open:
        path = self.folder / kind.file_name
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("wb")
        writer = ContainerWriter(file, None, kind.metadata(self.manifest.run, event_schema))
        opened = _Open(self._index.add_file(kind), file, writer, 0, is_dirty=True)
        self._open[kind] = opened
        return opened

    def _reopen(self, number: int, kind: Kind, size_bytes: int, num_records: int) -> None:
        path = self.folder / kind.file_name
        actual = path.stat().st_size if path.exists() else 0
        if not size_bytes:  # made, and killed before its first commit
            path.unlink(missing_ok=True)
            self._index.forget_file(number)
            return
        if actual < size_bytes:
            raise DamagedError(
                f"{path} has {actual} bytes, its index counts {size_bytes}: records are missing, "
                "so it cannot be gone on with; record into another folder"
            )
        file = path.open("r+b")
        header = read_header(file, kind.file_name)
        file.truncate(size_bytes)
        file.seek(size_bytes)
        self._open[kind] = _Open(number, file, ContainerWriter(file, header, {}), num_records)


def _begun(folder: Path, wanted: Manifest) -> Manifest | None:
    """The manifest of the recording that is there and can be gone on with; None: there is none.

    Raises:
        RecordingError: something else is there, or nothing can be added to it.
    """
    if not folder.exists():
        return None
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else {""}
    names = {name for name in names if not name.startswith(".")}  # the lock, half a manifest
    if not names:
        return None
    if MANIFEST_FILE not in names:
        raise RecordingError(f"{folder} is there already, and is no recording: name another folder")
    found = _resumable(folder, wanted)
    if INDEX_FILE in names:
        return found
    if names != {MANIFEST_FILE}:
        raise RecordingError(
            f"{folder}: {INDEX_FILE} is missing, which says up to where its files count: it can be "
            "read, but not gone on with; name another folder"
        )
    return None  # killed before the first record


def _locked(folder: Path) -> int:
    try:
        return take(folder / LOCK_FILE)
    except OwnedError as err:
        raise RecordingError(
            f"{folder} is being written by another `rlstreams record` (process {err.owner}): wait "
            "for it, stop it with Ctrl-C, or name another folder with --out"
        ) from None


def _resumable(folder: Path, wanted: Manifest) -> Manifest:
    """The manifest of what is there.

    Raises:
        RecordingError: nothing can be added to it.
    """
    found = load(folder)
    if found.is_sealed:
        raise RecordingError(f"{folder} holds a finished recording: name another folder")
    for name in ("run", "cluster_id", "selection"):
        old, new = getattr(found, name), getattr(wanted, name)
        if old != new:
            raise RecordingError(f"{folder} holds a recording with {name} {old!r}, this is {new!r}")
    for name, topic in wanted.topics.items():
        if found.topics.get(name, RecordedTopic(id="", partitions=0)).id != topic.id:
            raise RecordingError(f"{folder}: topic {name} was made anew since it was begun")
    return found


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sync(folder: Path) -> None:
    """Every file, copies of weights included, and the names in every folder."""
    for path in folder.rglob("*"):
        _fsync(path)
    _fsync(folder)


def _recorded(folder: Path, name: str, num_records: int) -> RecordedFile:
    path = folder / name
    return RecordedFile(
        name=name,
        size_bytes=path.stat().st_size,
        sha256=sha256_of(path),
        num_records=num_records,
    )


def _others(folder: Path) -> list[str]:
    """The index, and weights or checkpoints that lie in subfolders."""
    paths = [p for p in folder.rglob("*") if p.is_file() and p.suffix != ".avro"]
    names = [str(p.relative_to(folder)) for p in paths]
    return [n for n in names if not n.startswith((".", "manifest.json"))]
