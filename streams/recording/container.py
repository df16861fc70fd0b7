"""Avro object container files, block by block: written by splicing, read from any block.

Apache Avro specification 1.12, "Object Container Files": a header (magic, metadata, sync marker),
then blocks (count, size, bytes, sync marker). Our own few lines and not a library's writer, because
a record's body lies in the log in Avro binary encoding already: it goes into the file as it is, and
comes out bit for bit (decision 0015). Blocks are zstd frames with a checksum.
"""

from __future__ import annotations

import io
import json
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple

import zstandard

from rlstreams.schemas.tensor import Buffer
from rlstreams.schemas.varint import long_bytes, read_long
from rlstreams.streams.recording.errors import DamagedError, ForeignFileError

MAGIC = b"Obj\x01"
SYNC_BYTES = 16
CODEC = "zstandard"
BLOCK_BYTES = 256 * 1024  # of a block before compression; a larger record has one of its own
_LEVEL = 1
_LONGEST_LONG = 10
_LARGEST_BLOCK = 1 << 31  # a size beyond it is a damaged size
_HEADER_STEP = 64 * 1024
_LARGEST_HEADER = 16 << 20  # a schema has some 10 kB


class Place(NamedTuple):
    """Where a record lies in its file."""

    block_at: int  # byte at which its block begins
    number: int  # which record of the block, from 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """What a container file says of itself."""

    metadata: Mapping[str, bytes]
    sync: bytes
    size_bytes: int

    @property
    def schema(self) -> str:
        """The text of the schema of its records."""
        return self.metadata["avro.schema"].decode()

    @property
    def codec(self) -> str:
        """How blocks are compressed."""
        return self.metadata.get("avro.codec", b"null").decode()


class Block(NamedTuple):
    """One block, uncompressed."""

    at: int
    end: int
    num_records: int
    data: bytes


class ContainerWriter:
    """Appends records to one file; a block is written when it is full, or by `flush`.

    Args:
        file: opened for writing, at its end.
        header: of a new file, which is written at once, or as `read_header` found it.
    """

    def __init__(self, file: BinaryIO, header: Header | None, metadata: Mapping[str, str]) -> None:
        self._file = file
        # The checksum is what detects a changed byte within a block.
        self._compressor = zstandard.ZstdCompressor(level=_LEVEL, write_checksum=True)
        self._pieces: list[Buffer] = []
        self._num_records = self._num_bytes = 0
        if header is None:
            self._sync = secrets.token_bytes(SYNC_BYTES)
            file.write(_header_bytes(metadata, self._sync))
        else:
            self._sync = header.sync
        self.size_bytes = file.tell()

    def append(self, pieces: Sequence[Buffer]) -> Place:
        """Add one encoded record, given in pieces; where it will lie."""
        num_bytes = sum(map(len, pieces))
        if self._num_bytes and self._num_bytes + num_bytes > BLOCK_BYTES:
            self.flush()
        place = Place(self.size_bytes, self._num_records)
        self._pieces += pieces
        self._num_records += 1
        self._num_bytes += num_bytes
        return place

    def flush(self) -> None:
        """Write the open block, if it holds something, and hand all bytes to the system."""
        if self._num_records:
            data = self._compressor.compress(b"".join(self._pieces))
            block = b"".join(
                (long_bytes(self._num_records), long_bytes(len(data)), data, self._sync)
            )
            self._file.write(block)
            self.size_bytes += len(block)
            self._pieces, self._num_records, self._num_bytes = [], 0, 0
        self._file.flush()


def _header_bytes(metadata: Mapping[str, str], sync: bytes) -> bytes:
    items = {**metadata, "avro.codec": CODEC}
    out = [MAGIC, long_bytes(len(items))]
    for key, text in items.items():
        for word in (key.encode(), text.encode()):
            out += [long_bytes(len(word)), word]
    return b"".join((*out, b"\x00", sync))


def read_header(file: BinaryIO, name: str) -> Header:
    """The header; leaves the file anywhere.

    Args:
        name: of the file, for messages.

    Raises:
        ForeignFileError: no Avro container file, or one whose codec we do not know.
        DamagedError: it ends within its header.
    """
    file.seek(0)
    data = file.read(_HEADER_STEP)
    while True:
        if data[: len(MAGIC)] != MAGIC[: len(data)]:
            raise ForeignFileError(f"{name} is no Avro container file: it begins with {data[:4]!r}")
        try:
            header = _parse_header(data)
            break
        except IndexError:
            if len(data) > _LARGEST_HEADER:
                raise DamagedError(
                    f"{name}: its header is damaged: it does not end within "
                    f"{_LARGEST_HEADER >> 20} MiB"
                ) from None
            more = file.read(len(data))
            if not more:
                raise DamagedError(
                    f"{name} ends at byte {len(data)}, within its header: no record can be read"
                ) from None
            data += more
        except (ValueError, RecursionError) as err:
            raise DamagedError(f"{name}: its header is damaged: {err}") from err
    if header.codec not in (CODEC, "null"):
        raise ForeignFileError(
            f"{name} is compressed with codec {header.codec!r}; this reads {CODEC!r} and 'null': "
            "rlstreams writes no other, so the file was written, or changed, by something else"
        )
    return header


def _parse_header(data: bytes) -> Header:
    """Raises IndexError where it is cut, ValueError where it makes no sense."""
    at = len(MAGIC)
    metadata: dict[str, bytes] = {}
    while True:
        count, at = read_long(data, at)
        if count == 0:
            break
        if count < 0:
            count = -count
            _, at = read_long(data, at)
        for _ in range(count):
            key, at = _read_bytes(data, at)
            metadata[key.decode()], at = _read_bytes(data, at)
    if at + SYNC_BYTES > len(data):
        raise IndexError
    if "avro.schema" not in metadata:
        raise ValueError("it has no avro.schema")
    json.loads(metadata["avro.schema"])
    header = Header(metadata=metadata, sync=data[at : at + SYNC_BYTES], size_bytes=at + SYNC_BYTES)
    _ = header.schema, header.codec  # they are text
    return header


def _read_bytes(data: bytes, at: int) -> tuple[bytes, int]:
    size, at = read_long(data, at)
    if size < 0:
        raise ValueError(f"a length of {size} at byte {at}")
    if at + size > len(data):
        raise IndexError
    return data[at : at + size], at + size


class ContainerReader:
    """Blocks of one file, in order or one at a time.

    Raises:
        ForeignFileError: see `read_header`.
        DamagedError: see there, or the file cannot be opened.
    """

    def __init__(self, path: Path, name: str = "") -> None:
        self.name = name or path.name
        try:
            self._file = path.open("rb")
        except (OSError, ValueError) as err:  # a name that was changed may be none
            raise self._unreadable(err) from err
        self._decompressor = zstandard.ZstdDecompressor()
        try:
            self.header = read_header(self._file, self.name)
            self.size_bytes = self._file.seek(0, io.SEEK_END)
        except OSError as err:
            self._file.close()
            raise self._unreadable(err) from err
        except Exception:
            self._file.close()
            raise

    def blocks(self, at: int = 0, until: int | None = None) -> Iterator[Block]:
        """From the block that begins at `at` (0: the first) to the last whole one.

        Ends quietly where the file was cut: `size_bytes` and the end of the last block tell.

        Args:
            at: where to begin.
            until: the size that the file is known to have had; blocks beyond it are left out.

        Raises:
            DamagedError: bytes within a block were changed; names them.
        """
        at = max(at, self.header.size_bytes)
        while at < (self.size_bytes if until is None else min(until, self.size_bytes)):
            block = self._block(at)
            if block is None:
                if until is not None and self.size_bytes >= until:  # not cut: its size was changed
                    raise self._damaged(at, until)
                return
            yield block
            at = block.end

    def block(self, at: int) -> Block:
        """The block that begins at `at`.

        Raises:
            DamagedError: it is not whole, or was changed.
        """
        block = self._block(at)
        if block is None:
            raise DamagedError(
                f"{self.name}: the block at byte {at} is not whole: "
                f"the file ends at byte {self.size_bytes}"
            )
        return block

    def _block(self, at: int) -> Block | None:
        """None if the file ends within it."""
        if at < self.header.size_bytes:
            raise DamagedError(f"{self.name}: no block begins at byte {at}", at=at)
        head = self._read(at, 2 * _LONGEST_LONG)
        try:
            num_records, i = read_long(head, 0)
            size, i = read_long(head, i)
        except IndexError:
            return None  # fewer bytes than two integers are left
        except ValueError:
            raise self._damaged(at, at + len(head)) from None
        if num_records < 1 or not 0 <= size < _LARGEST_BLOCK:
            raise self._damaged(at, at + i)
        end = at + i + size + SYNC_BYTES
        if end > self.size_bytes:
            return None
        body = self._read(at + i, size + SYNC_BYTES)
        if body[size:] != self.header.sync:
            raise self._damaged(at, end)
        try:
            data = self._uncompressed(body[:size])
        except (zstandard.ZstdError, MemoryError):
            raise self._damaged(at, end) from None
        return Block(at, end, num_records, data)

    def _read(self, at: int, size: int) -> bytes:
        try:
            self._file.seek(at)
            return self._file.read(size)
        except OSError as err:
            raise self._unreadable(err, at) from err

    def _uncompressed(self, body: bytes) -> bytes:
        if self.header.codec == "null":
            return body
        # A foreign writer's frame may not declare its size; one that was changed, any.
        declared = zstandard.frame_content_size(body)
        if declared > _LARGEST_BLOCK:
            raise zstandard.ZstdError(f"a block of {declared} bytes")
        if declared < 0:
            return self._decompressor.decompressobj().decompress(body)
        return self._decompressor.decompress(body)

    def _unreadable(self, error: OSError | ValueError, at: int = 0) -> DamagedError:
        why = getattr(error, "strerror", None) or str(error)
        return DamagedError(f"{self.name} cannot be read at byte {at}: {why}", at=at)

    def _damaged(self, at: int, end: int) -> DamagedError:
        return DamagedError(
            f"{self.name}: bytes were changed in the block at byte {at}, before byte {end}", at=at
        )

    def next_block_after(self, at: int) -> int | None:
        """Where the first block begins whose predecessor's sync marker ends above `at`.

        To go on behind a damaged block. None: no further marker.
        """
        step, overlap = 1 << 20, SYNC_BYTES - 1
        position = max(at, self.header.size_bytes)
        while position < self.size_bytes:
            found = self._read(position, step + overlap).find(self.header.sync)
            if found >= 0:
                return position + found + SYNC_BYTES
            position += step
        return None

    def close(self) -> None:
        """Release the file; idempotent."""
        self._file.close()
