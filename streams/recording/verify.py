"""Reads every byte of a recording, and names what is not as it was written."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rlstreams.schemas import DecodeError
from rlstreams.streams.recording.manifest import DamagedError, sha256_of
from rlstreams.streams.recording.reader import Recording
from rlstreams.streams.recording.table import RECORD, read_group, records_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """What a look at every byte found."""

    num_records: int  # that were read
    problems: tuple[str, ...]  # one sentence each; empty: all is as it was written


def verify(folder: Path) -> Verified:
    """Check hashes, pages and every event of a recording; changes nothing.

    Raises:
        ForeignFileError: no recording, or one of another format.
    """
    try:
        recording = Recording(folder)
    except DamagedError as err:
        return Verified(num_records=0, problems=(str(err),))
    problems, num_records = [*recording.problems], 0
    for group in recording.groups:
        try:
            table = read_group(folder, group, (*RECORD, "event"))
        except DamagedError as err:
            problems.append(str(err))
            continue
        num_records += table.num_rows
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
            elif sha256_of(path) != file.sha256:
                problems.append(f"{path}: bytes were changed: its hash is not the manifest's")
    return Verified(num_records=num_records, problems=tuple(dict.fromkeys(problems)))
