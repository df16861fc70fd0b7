"""What a recording lacks, as far as sizes, counts and names tell it: nothing is read through."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rlstreams.streams.log.counted import counted
from rlstreams.streams.recording.index import Index, IndexedFile
from rlstreams.streams.recording.manifest import Manifest


def num_text(num_records: int) -> str:
    """`1 record`, `2 records`."""
    return counted(num_records, "record")


def cut_text(index: Index, file: IndexedFile, size_bytes: int) -> str:
    """What a file that is too short lacks."""
    # The block in which the file ends is not whole, unless it ends right at the next one.
    borders = [*index.blocks(file.number), file.size_bytes]
    whole_until = max((at for at in borders if at <= size_bytes), default=0)
    num_whole = index.count("r.file = ? AND r.block_at < ?", [file.number, whole_until])
    first = next(
        index.entries(
            'r.file = ? AND r.block_at >= ? ORDER BY r."offset" LIMIT 1',
            [file.number, whole_until],
        ),
        None,
    )
    since = f", from {first.position} on" if first else ""
    return (
        f"{file.name} was cut: it ends at byte {size_bytes} of {file.size_bytes}; "
        f"{num_text(file.num_records - num_whole)} of {file.num_records} are missing{since}"
    )


def unlike_manifest(folder: Path, manifest: Manifest, files: list[IndexedFile]) -> Iterator[str]:
    """Container files of a sealed recording that do not hold what they held when it was sealed.

    Args:
        files: as the index counts them; it may have been made from what is left.
    """
    indexed = {file.name: file for file in files}
    for file in manifest.files:
        if not file.name.endswith(".avro"):
            continue
        path, found = folder / file.name, indexed.get(file.name)
        if found is None:
            what = "is missing" if not path.exists() else "is not in the index"
            yield f"{file.name} {what}: {num_text(file.num_records)}"
        elif found.num_records != file.num_records:
            lost = file.num_records - found.num_records
            rest = f": {num_text(lost)} {'is' if lost == 1 else 'are'} missing" if lost > 0 else ""
            yield f"{file.name} holds {num_text(found.num_records)} of {file.num_records}{rest}"
        elif path.exists() and path.stat().st_size > file.size_bytes:
            yield (
                f"{file.name} has {path.stat().st_size} bytes, and had {file.size_bytes} when the "
                "recording was sealed"
            )
