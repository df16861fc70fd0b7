"""Looks at every byte of a recording, and names what is not as it was written."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rlstreams.schemas import DecodeError
from rlstreams.streams.recording.container import ContainerReader
from rlstreams.streams.recording.envelope import OPAQUE
from rlstreams.streams.recording.errors import DamagedError, RecordingError
from rlstreams.streams.recording.index import INDEX_FILE, IndexedFile
from rlstreams.streams.recording.manifest import MANIFEST_FILE, load, sha256_of
from rlstreams.streams.recording.reader import Recording


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """What a look at every byte found."""

    num_files: int
    num_records: int  # that were read and decoded
    problems: tuple[str, ...]  # one sentence each; empty: all is as it was written


def verify(folder: Path) -> Verified:
    """Check hashes, blocks, the index and every event of a recording; changes nothing.

    Raises:
        ForeignFileError: no recording, or one of a newer format.
    """
    try:
        recording = Recording(folder)
    except DamagedError as err:
        return Verified(num_files=0, num_records=0, problems=(str(err),))
    with recording:
        problems = list(recording.problems)
        counts = [_read_through(recording, file, problems) for file in recording.files]
        problems += _hashes(folder, problems)
        return Verified(
            num_files=len(recording.files),
            num_records=sum(counts),
            problems=tuple(dict.fromkeys(problems)),
        )


def _read_through(recording: Recording, file: IndexedFile, problems: list[str]) -> int:
    """Records of one file that are whole and decode."""
    damaged: list[DamagedError] = []
    count = 0
    for raw in recording.file_records(file, on_damage=damaged.append):
        count += 1
        if file.kind.event != OPAQUE:
            try:
                recording.decoded(raw)
            except DecodeError as err:
                problems.append(f"{raw.position} in {file.name} does not decode: {err}")
    problems += [str(err) for err in damaged]
    is_named = any(problem.startswith(file.name) for problem in problems)
    if not is_named and count != file.num_records:
        problems.append(f"{file.name} holds {count} records, its index counts {file.num_records}")
    return count


def _hashes(folder: Path, found: list[str]) -> list[str]:
    """Files of a sealed recording whose bytes are others, as far as nothing else named them."""
    manifest = load(folder)
    problems = []
    for file in manifest.files:
        path = folder / file.name
        if any(problem.startswith(file.name) for problem in found):
            continue
        if not path.exists():
            problems.append(f"{file.name} is missing")
        elif sha256_of(path) != file.sha256:
            problems.append(f"{file.name}: bytes were changed{_where(path, file.name)}")
    if not manifest.is_sealed:
        return problems
    known = {file.name for file in manifest.files} | {MANIFEST_FILE}
    strangers = sorted(str(p.relative_to(folder)) for p in folder.rglob("*.avro") if p.is_file())
    return problems + [
        f"{name} is no file of this recording" for name in strangers if name not in known
    ]


def _where(path: Path, name: str) -> str:
    """All blocks were read and are whole: what differs is the header, or means nothing (an unused
    bit of a frame, bytes behind the last block)."""
    if name == INDEX_FILE or path.suffix != ".avro":
        return ""
    try:
        reader = ContainerReader(path, name)
    except RecordingError as err:
        return f": {err}"
    size = reader.header.size_bytes
    reader.close()
    return f" in its header (bytes 0 to {size}), or where no record hangs on them"
