"""Makes the index of a recording anew from its container files, which alone are the truth."""

from __future__ import annotations

from pathlib import Path

from rlstreams.streams.log.record import Partition
from rlstreams.streams.recording.container import Block, ContainerReader, Place
from rlstreams.streams.recording.envelope import OPAQUE, Describer, Kind, event_schema, records_of
from rlstreams.streams.recording.errors import DamagedError, ForeignFileError
from rlstreams.streams.recording.facts import TrainedFact, facts_of, trained_by
from rlstreams.streams.recording.index import Index, Span, row_of


def rebuild(folder: Path, path: Path) -> list[str]:
    """Write an index of `folder` to `path`; what could not be read, one sentence each.

    Raises:
        DamagedError: there is no container file at all.
    """
    problems: list[str] = []
    files = sorted(folder.rglob("*.avro"))
    if not files:
        raise DamagedError(f"{folder} holds neither an index nor a container file")
    index = Index(path, writable=True)
    try:
        spans: dict[Partition, Span] = {}
        for file in files:
            try:
                _index_file(index, file, str(file.relative_to(folder)), spans, problems)
            except (ForeignFileError, DamagedError) as err:
                problems.append(str(err))
        index.begin()
        index.set_spans(spans)
        index.commit()
    finally:
        index.close()
    return problems


def _index_file(
    index: Index, path: Path, name: str, spans: dict[Partition, Span], problems: list[str]
) -> None:
    reader = ContainerReader(path, name)
    try:
        kind = Kind.of(reader.header, name)
        if kind.file_name != name:
            raise ForeignFileError(f"{name} should be named {kind.file_name}")
        number = index.add_file(kind)
        print_ = kind.fingerprint
        known = {} if kind.event == OPAQUE else {print_: event_schema(reader, print_)}
        describe = Describer(known)
        count, end, at = 0, reader.header.size_bytes, 0
        while True:
            try:
                for block in reader.blocks(at):
                    count += _index_block(index, number, block, kind, describe, spans)
                    end = at = block.end
                break
            except DamagedError as err:
                problems.append(str(err))
                following = reader.next_block_after(err.at + 1)
                if following is None or following <= err.at:
                    break
                at = following
        if end < reader.size_bytes:
            problems.append(f"{name}: what follows byte {end} is no whole block")
        index.set_file(number, end, count)
    finally:
        reader.close()


def _index_block(
    index: Index,
    number: int,
    block: Block,
    kind: Kind,
    describe: Describer,
    spans: dict[Partition, Span],
) -> int:
    rows: list[tuple[object, ...]] = []
    trained: list[TrainedFact] = []
    for place, raw in enumerate(records_of(block, kind, kind.file_name)):
        event = describe(raw).event
        offset = raw.position.offset
        where = Place(block.at, place)
        rows.append(
            row_of(number, offset, where, raw.timestamp_ms, len(raw.value), facts_of(event))
        )
        trained += trained_by(event)
        span = spans.get(kind.partition, Span(first=offset, next=offset + 1))
        spans[kind.partition] = Span(
            first=min(span.first, offset), next=max(span.next, raw.offsets[-1] + 1)
        )
    index.begin()
    try:
        index.add_records(rows)
        index.add_trained(trained)
        index.commit()
    except BaseException:
        index.rollback()
        raise
    return len(rows)
