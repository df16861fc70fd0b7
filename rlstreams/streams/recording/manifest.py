"""The manifest of a recording: run, configuration, topics, positions, hashes of its files.

`manifest.json` is written when a recording begins and once more when it is sealed; it then names
every file with its SHA-256, and carries its own.
"""

from __future__ import annotations

import json
import uuid
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from rlstreams.streams.digests import file_sha256, json_sha256
from rlstreams.streams.log.errors import StreamsError
from rlstreams.streams.synced import replace_synced


class RecordingError(StreamsError):
    """A recording that cannot be used as asked."""


class ForeignFileError(RecordingError):
    """A file or folder that is no part of this recording, or of another format."""


class DamagedError(RecordingError):
    """Bytes of a recording are missing or were changed."""


class NotRecordedError(RecordingError):
    """A requested record or step is not in the recording; names those that are."""


MANIFEST_FILE = "manifest.json"
SUFFIX = ".parquet"
FORMAT = 2  # 1 was a folder of Avro container files


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedFile:
    """One file of a sealed recording."""

    name: str  # relative to the folder
    size_bytes: int
    sha256: str
    num_records: int = 0  # 0 also for copies of weights and checkpoints


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedTopic:
    """One topic, as far as it was recorded."""

    id: str  # of the topic on its cluster
    partitions: int
    num_records: int = 0
    first: dict[str, int] = field(default_factory=dict)  # partition -> first offset that was there
    next: dict[str, int] = field(default_factory=dict)  # partition -> offset of its end


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordingManifest:
    """The description of a recording: its run, topics, positions and files."""

    format: int = FORMAT
    id: str = field(default_factory=lambda: uuid.uuid4().hex)  # written into each of its files
    run: str
    state: str = "recording"  # or "sealed"
    started_at_ms: int
    finished_at_ms: int = 0
    cluster_id: str = ""
    config: str = ""  # the run's configuration as JSON, without secrets
    versions: dict[str, str] = field(default_factory=dict)  # of the recorder's code and packages
    hashes: dict[str, str] = field(default_factory=dict)  # data set, tokenizer, model: as claimed
    topics: dict[str, RecordedTopic] = field(default_factory=dict)
    files: list[RecordedFile] = field(default_factory=list)

    @property
    def is_sealed(self) -> bool:
        """Whether the recording is finished, so that no file of it should change any more."""
        return self.state == "sealed"


def save(manifest: RecordingManifest, folder: Path) -> None:
    """Write the manifest, whole or not at all."""
    plain = msgspec.to_builtins(manifest)
    text = json.dumps({**plain, "manifest_sha256": json_sha256(plain)}, indent=1, sort_keys=True)
    temporary = folder / f".{MANIFEST_FILE}.tmp"
    temporary.write_text(text + "\n", encoding="utf-8")
    replace_synced(temporary, folder / MANIFEST_FILE)


def load(folder: Path) -> RecordingManifest:
    """Read the manifest of a recording.

    Raises:
        ForeignFileError: no recording, or one of another format.
        DamagedError: bytes of it were changed or are missing.
    """
    path = folder / MANIFEST_FILE
    try:
        plain = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError) as err:
        raise ForeignFileError(_no_manifest(folder)) from err
    except OSError as err:
        raise DamagedError(f"{path} cannot be read: {err.strerror}") from err
    except (ValueError, RecursionError) as err:
        raise DamagedError(f"{path}: bytes were changed or are missing: {err}") from err
    if not isinstance(plain, dict) or "format" not in plain:
        raise ForeignFileError(f"{path} is no manifest of a recording: it names no format")
    if plain["format"] != FORMAT:
        avro = "Avro container files of an older rlstreams, which any Avro tool reads: record again"
        advice = avro if plain["format"] == 1 else "a newer rlstreams wrote it: update this one"
        raise ForeignFileError(
            f"{folder} is a recording of format {plain['format']}, this release reads {FORMAT}; "
            f"{advice}"
        )
    if plain.pop("manifest_sha256", "") != json_sha256(plain):
        raise DamagedError(f"{path}: bytes were changed: its own hash does not fit")
    try:
        return msgspec.convert(plain, RecordingManifest)
    except msgspec.ValidationError as err:
        raise DamagedError(f"{path}: {err}") from err


def holds_files(folder: Path) -> bool:
    """Whether files of a recording lie in a folder, by their names."""
    return any(folder.glob(f"{'[0-9]' * 6}{SUFFIX}"))


def _no_manifest(folder: Path) -> str:
    if holds_files(folder):
        return (
            f"{folder} holds the files of a recording, but its {MANIFEST_FILE} is missing, which "
            "says of what run they are: copy it again from where it was recorded"
        )
    return f"{folder} is no recording: it is no folder with a {MANIFEST_FILE}"


def recorded_file(folder: Path, name: str, num_records: int) -> RecordedFile:
    """Return the entry of a folder's file, with its hash."""
    path = folder / name
    size_bytes, sha256 = path.stat().st_size, file_sha256(path)
    return RecordedFile(name=name, size_bytes=size_bytes, sha256=sha256, num_records=num_records)
