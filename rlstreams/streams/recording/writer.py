"""Writes one recording, and continues one whose recorder was killed.

Records gather in an unnamed file; `commit` gives it its name, with the positions behind it in its
footer. So a file is whole or not there, a kill costs the open file, and the next recorder reads on
from the positions of the last whole one.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from rlstreams.schemas import Event, fingerprint
from rlstreams.streams.log.bus import Closing
from rlstreams.streams.log.owner_lock import OwnedError, take
from rlstreams.streams.log.record import Partition, RawRecord
from rlstreams.streams.recording.manifest import (
    MANIFEST_FILE,
    SUFFIX,
    RecordingError,
    RecordingManifest,
    load,
    recorded_file,
    save,
)
from rlstreams.streams.recording.reader import Recording, own_prints
from rlstreams.streams.recording.table import (
    INDEXED,
    SCHEMA,
    Footer,
    footer_metadata,
    row_of,
    table_of,
)
from rlstreams.streams.synced import replace_synced, sync

LOCK_FILE = ".writer.lock"
GROUPS_BYTES = 32_000_000  # values that wait in memory before they become row groups
ROLL_BYTES = 256_000_000  # values in one file
ROLL_S = 60.0  # longest time between two files: a kill costs so much


class RecordingWriter(Closing):
    """A recording in the making; one writer at a time holds its lock.

    Args:
        folder: made if it is not there; an unfinished recording in it is continued.
        manifest: manifest of a new recording; a continued one keeps its own.

    Raises:
        RecordingError: the folder holds other files, a sealed recording, or another run's; or
            another process, which is named, writes to it.
    """

    def __init__(self, folder: Path, manifest: RecordingManifest) -> None:
        self.folder = folder
        self.num_records = 0  # appended by this writer
        self.schemas: dict[bytes, str] = {}  # of other releases, by fingerprint
        self.spans: dict[Partition, tuple[int, int]] = {}  # first offset, next to read
        self._waiting: dict[Partition, list[tuple[Any, ...]]] = {}
        self._waiting_bytes = self._file_bytes = self._number = 0
        self._opened_s: float | None = None  # monotonic time of the open file's first record
        self._parquet: pq.ParquetWriter | None = None
        # Records that came behind an incomplete one are in the files, and are delivered again.
        self._written: set[tuple[str, int, int]] = set()
        _begun(folder, manifest)  # a folder that is refused stays as it is
        folder.mkdir(parents=True, exist_ok=True)
        self._held = ExitStack()
        with ExitStack() as stack:
            stack.callback(os.close, _locked(folder))
            found = _begun(folder, manifest)  # another may have sealed it meanwhile
            self.is_resumed = found is not None
            self.manifest = found or manifest
            if found is None:
                save(manifest, folder)
            else:
                self._resume()
            stack.callback(self._drop)
            self._held = stack.pop_all()

    @property
    def is_due(self) -> bool:
        """Whether the open file is large or old enough for a commit."""
        return self._opened_s is not None and (
            self._file_bytes >= ROLL_BYTES or time.monotonic() - self._opened_s >= ROLL_S
        )

    def append(self, raw: RawRecord, event: Event | None = None) -> None:
        """Add one record, with its event if it has one; it counts from the next `commit` on.

        A record that is in the files already is passed by.
        """
        if raw.position in self._written:
            return
        self._opened_s = self._opened_s or time.monotonic()
        self._waiting.setdefault(raw.partition, []).append(row_of(raw, event))
        self.num_records += 1
        self._waiting_bytes += len(raw.value)
        self._file_bytes += len(raw.value)
        if self._waiting_bytes >= GROUPS_BYTES:
            self._write_groups()

    def learn(self, text: str) -> None:
        """Note a schema; another release's goes into the files to come."""
        if (print_ := fingerprint(text)) not in own_prints():
            self.schemas[print_] = text

    def commit(self, positions: Mapping[Partition, int], first: Mapping[Partition, int]) -> None:
        """Give the open file its name: from here on everything appended counts.

        Args:
            positions: next offset to read, by partition.
            first: offset at which reading began, of partitions that are new in the recording.
        """
        for p, at in positions.items():
            begun, _ = self.spans.get(p, (first.get(p, at), at))
            self.spans[p] = begun, at
        if self._opened_s is None:
            return
        name = f"{self._number:06}{SUFFIX}"
        footer = Footer(
            recording=self.manifest.id,
            run=self.manifest.run,
            name=name,
            positions=[(*p, *span) for p, span in self.spans.items()],
            schemas=list(self.schemas.values()),
        )
        try:
            parquet = self._write_groups()
            parquet.add_key_value_metadata(footer_metadata(footer))
            parquet.close()
            replace_synced(self._temporary, self.folder / name)
        except (OSError, pa.ArrowException) as err:
            raise RecordingError(f"{self.folder / name} cannot be written: {err}") from err
        self._parquet, self._opened_s, self._file_bytes = None, None, 0
        self._number += 1

    def seal(self, *, extra: RecordingManifest | None = None) -> RecordingManifest:
        """Finish: sync and hash every file, and name it in the manifest.

        Args:
            extra: a manifest with facts that became known meanwhile (hashes, configuration).
        """
        self._drop()
        copies = [p for p in self.folder.rglob("*") if p.is_dir() or p.parent != self.folder]
        for path in copies:  # weights and checkpoints, and their folders
            sync(path)
        with Recording(self.folder) as recording:
            counts = recording.num_by_file
            by_topic = recording.num_by_topic
        names = [*counts, *(str(p.relative_to(self.folder)) for p in copies if p.is_file())]
        base, spans = extra or self.manifest, sorted(self.spans.items())
        topics = {
            name: replace(
                topic,
                num_records=by_topic.get(name, 0),
                first={str(p.number): s[0] for p, s in spans if p.topic == name},
                next={str(p.number): s[1] for p, s in spans if p.topic == name},
            )
            for name, topic in base.topics.items()
        }
        files = [recorded_file(self.folder, name, counts.get(name, 0)) for name in sorted(names)]
        now_ms = time.time_ns() // 1_000_000
        self.manifest = replace(
            base, state="sealed", finished_at_ms=now_ms, files=files, topics=topics
        )
        save(self.manifest, self.folder)
        (self.folder / LOCK_FILE).unlink(missing_ok=True)  # nobody writes here any more
        self.close()
        return self.manifest

    def close(self) -> None:
        """Release file and lock; uncommitted records are lost. Idempotent."""
        self._held.close()

    @property
    def _temporary(self) -> Path:
        return self.folder / ".open.tmp"

    def _write_groups(self) -> pq.ParquetWriter:
        """Write a row group for each partition with waiting records."""
        if self._parquet is None:
            self._parquet = pq.ParquetWriter(
                self._temporary,
                SCHEMA,
                compression="zstd",
                compression_level=1,
                use_dictionary=["topic", "partition", "event", "step", "version"],
                write_statistics=INDEXED,
                write_page_checksum=True,
            )
        for rows in self._waiting.values():
            self._parquet.write_table(table_of(rows), row_group_size=len(rows))
        self._waiting, self._waiting_bytes = {}, 0
        return self._parquet

    def _drop(self) -> None:
        """Drop the open file and the waiting records."""
        if self._parquet is not None:
            self._parquet.close()
            self._parquet = None
        self._waiting, self._waiting_bytes, self._opened_s = {}, 0, None
        self._temporary.unlink(missing_ok=True)

    def _resume(self) -> None:
        """Go on from the end of the last whole file.

        Raises:
            RecordingError: a file is missing or cannot be read.
        """
        with Recording(self.folder) as recording:
            if recording.problems:
                raise RecordingError(
                    f"{self.folder} cannot be continued, record into another folder: "
                    f"{recording.problems[0]}"
                )
            self._number = len(recording.num_by_file)
            self.schemas |= recording.schemas
            self.spans = recording.spans
            self._written = {
                raw.position
                for p, (_, at) in self.spans.items()
                for raw in recording.partition(p, start=at)
            }


def _begun(folder: Path, wanted: RecordingManifest) -> RecordingManifest | None:
    """Return the manifest of a recording that can be continued; None: the folder has none.

    Raises:
        RecordingError: the folder holds other files, or a recording that cannot be continued.
    """
    if not folder.exists():
        return None
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else {""}
    if not {name for name in names if not name.startswith(".")}:  # the lock, half a manifest
        return None
    if MANIFEST_FILE not in names:
        raise RecordingError(f"{folder} is there already, and is no recording: name another folder")
    found = load(folder)
    if found.is_sealed:
        raise RecordingError(f"{folder} holds a finished recording: name another folder")
    for name in ("run", "cluster_id"):
        old, new = getattr(found, name), getattr(wanted, name)
        if old != new:
            raise RecordingError(f"{folder} holds a recording with {name} {old!r}, this is {new!r}")
    for name, topic in found.topics.items():  # a topic that was made later is not recorded here
        if name in wanted.topics and wanted.topics[name].id != topic.id:
            raise RecordingError(f"{folder}: topic {name} was made anew since it was begun")
    return found


def _locked(folder: Path) -> int:
    try:
        return take(folder / LOCK_FILE)
    except OwnedError as err:
        raise RecordingError(
            f"{folder} is being written by another `rlstreams record` (process {err.owner}): wait "
            "for it, stop it with Ctrl-C, or name another folder with --out"
        ) from None
