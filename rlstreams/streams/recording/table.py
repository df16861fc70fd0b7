"""The Parquet table of a recording: its columns, records as rows, and its footer.

A row group holds records of one partition, as they were delivered. So the minima and maxima in the
footers are an index by partition, offset, time and key; there is no other.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from rlstreams.schemas.events import (
    CallCommitted,
    Event,
    Prompt,
    ScoredTrajectory,
    StepsRedone,
    Trajectory,
)
from rlstreams.streams.log.record import Partition, Position, RawRecord
from rlstreams.streams.recording.manifest import DamagedError, ForeignFileError
from rlstreams.streams.segments import sampled_segments

_HEADER = pa.struct([pa.field("name", pa.string()), pa.field("value", pa.binary())])
# Footers are read by the place of a column: columns without children come first.
SCHEMA = pa.schema(
    [
        pa.field("topic", pa.string(), nullable=False),
        pa.field("partition", pa.int32(), nullable=False),
        pa.field("offset", pa.int64(), nullable=False),
        pa.field("time", pa.timestamp("ms", tz="UTC"), nullable=False),
        pa.field("key", pa.binary(), nullable=False),
        pa.field("event", pa.string()),
        pa.field("sample", pa.string()),
        pa.field("step", pa.int64()),
        pa.field("version", pa.int64()),
        pa.field("part_offsets", pa.list_(pa.int64())),
        pa.field("headers", pa.list_(_HEADER), nullable=False),
        pa.field("value", pa.binary(), nullable=False),
    ]
)
INDEXED = SCHEMA.names[:9]
RECORD = ("offset", "time", "key", "part_offsets", "headers", "value")
_FOOTER_KEY = b"rlstreams"
# Errors that pyarrow raises for bytes that are no table, or no longer one.
UNREADABLE = (pa.ArrowException, OSError, ValueError, TypeError, KeyError, MemoryError)


class Footer(msgspec.Struct, frozen=True, kw_only=True):
    """Metadata of a file, as JSON under the key `rlstreams` of its footer."""

    recording: str  # id of its manifest
    run: str
    name: str  # the file's own
    # Topic, partition, first offset that was there, next offset to read behind this file.
    positions: list[tuple[str, int, int, int]]
    schemas: list[str]  # texts of other releases


class RowGroup(NamedTuple):
    """Records of one partition that lie together."""

    file: str
    number: int  # in its file
    partition: Partition
    num_records: int
    offsets: tuple[int, int]  # least and greatest
    times_ms: tuple[int, int]
    keys: tuple[bytes, bytes] | None  # least and greatest; None: not in the footer
    size_bytes: int  # before compression


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Index columns of an event; None where it has no such field."""

    group_id: str | None = None
    sample: int | None = None
    session: str | None = None  # of an agent, where the event has no sample
    step: int | None = None
    version: int | None = None  # that it made, announced or loaded; the newest that sampled it

    @property
    def name(self) -> str | None:
        """Name of the sample, `17/3`, or of the session."""
        return self.session if self.sample is None else f"{self.group_id}/{self.sample}"


def facts_of(event: Event | None) -> Facts:
    """Return an event's index columns; empty ones for a record of no event."""
    subject = event.trajectory if isinstance(event, ScoredTrajectory) else event
    versions: list[Any]
    if isinstance(subject, Trajectory):
        versions = [s.policy_version for s in sampled_segments(subject)]
    elif isinstance(subject, CallCommitted):
        versions = [s.policy_version for s in subject.segments]
    elif isinstance(subject, Prompt):
        versions = [subject.min_policy_version]
    else:
        versions = [getattr(subject, "policy_version", None)]
    step = subject.last_step if isinstance(subject, StepsRedone) else getattr(subject, "step", None)
    return Facts(
        group_id=getattr(subject, "group_id", None),
        sample=getattr(subject, "sample", None),
        session=getattr(subject, "session_id", None),
        step=step,
        version=max(versions, default=None),
    )


def row_of(raw: RawRecord, event: Event | None) -> tuple[Any, ...]:
    """Return the record as a row, in the order of `SCHEMA`."""
    facts = facts_of(event)
    return (
        *raw.position,
        raw.timestamp_ms,
        raw.key,
        None if event is None else type(event).__name__,
        facts.name,
        facts.step,
        facts.version,
        raw.offsets if len(raw.offsets) > 1 else None,
        [*raw.headers.items()],
        raw.value,
    )


def table_of(rows: Sequence[tuple[Any, ...]]) -> pa.Table:
    """Return rows as a table."""
    columns = zip(*rows, strict=True)
    arrays = [pa.array(c, f.type) for c, f in zip(columns, SCHEMA, strict=True)]
    return pa.Table.from_arrays(arrays, schema=SCHEMA)


def records_of(table: pa.Table, partition: Partition) -> Iterator[RawRecord]:
    """Yield the records of a table with the columns `RECORD`: values bit for bit as read."""
    columns: list[list[Any]] = [
        (column.cast(pa.int64()) if name == "time" else column).to_pylist()
        for name, column in ((name, table[name]) for name in RECORD)
    ]
    topic, number = partition
    for offset, time_ms, key, parts, headers, value in zip(*columns, strict=True):
        yield RawRecord(
            Position(topic, number, offset),
            tuple(parts) if parts else (offset,),
            key,
            value,
            {header["name"]: header["value"] for header in headers},
            time_ms,
        )


def read_group(folder: Path, group: RowGroup, columns: Iterable[str] = RECORD) -> pa.Table:
    """Read columns of a row group; every page's checksum is verified.

    Raises:
        DamagedError: bytes are missing or were changed.
    """
    path = folder / group.file
    try:
        with pq.ParquetFile(path, page_checksum_verification=True, pre_buffer=False) as file:
            return file.read_row_group(group.number, columns=list(columns))
    except UNREADABLE as err:
        raise DamagedError(f"{path}: bytes are missing or were changed: {err}") from err


def read_footer(path: Path) -> tuple[Footer, list[RowGroup]]:
    """Read the footer and the row groups of a recording's file.

    Raises:
        ForeignFileError: a file of another kind.
        DamagedError: bytes are missing or were changed.
    """
    try:
        with pq.ParquetFile(path) as file:
            said, is_ours = file.metadata.metadata or {}, file.schema_arrow.equals(SCHEMA)
            if _FOOTER_KEY not in said or not is_ours:
                raise ForeignFileError(
                    f"{path} is no file of a recording: a Parquet file with the columns "
                    f"{', '.join(file.schema_arrow.names[:5])}"
                )
            footer = msgspec.json.decode(said[_FOOTER_KEY], type=Footer)
            metadata = file.metadata
            groups = [
                _row_group(path.name, number, metadata.row_group(number))
                for number in range(metadata.num_row_groups)
            ]
    except FileNotFoundError as err:
        raise DamagedError(f"{path} is missing") from err
    except UNREADABLE as err:
        raise DamagedError(
            f"{path} cannot be read: it was cut, or bytes were changed: {err}"
        ) from err
    return footer, groups


def _row_group(file: str, number: int, metadata: Any) -> RowGroup:  # noqa: ANN401
    said = [metadata.column(index).statistics for index in range(5)]
    topic, partition, offset, time = ((s.min_raw, s.max_raw) for s in said[:4])
    if topic[0] != topic[1] or partition[0] != partition[1]:
        raise ValueError(f"row group {number} is of several partitions")
    keys = said[4]
    return RowGroup(
        file,
        number,
        Partition(topic[0].decode(), partition[0]),
        metadata.num_rows,
        offset,
        time,
        (keys.min_raw, keys.max_raw) if keys is not None and keys.has_min_max else None,
        metadata.total_byte_size,
    )


def footer_metadata(footer: Footer) -> dict[bytes, bytes]:
    """Return the footer as Parquet key-value metadata."""
    return {_FOOTER_KEY: msgspec.json.encode(footer)}
