"""A file of the store: one version, whole (an anchor) or as the difference to another (a delta).

`RLWL`, the length of the header (u32, little-endian), the header in JSON, pieces, SHA-256 of all
before it. A piece is its form (u8), its length (u32) and its bytes, see `delta.py`; tensors follow
each other in name order, each in pieces of `PIECE_WORDS` words. Written and read front to back.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import struct
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, BinaryIO, TypeVar

from rlstreams.schemas.events import NO_VERSION
from rlstreams.workers.weights.channel import WeightError
from rlstreams.workers.weights.layout import parse_layout
from rlstreams.workers.weights.store.delta import DeltaError, Words, apply, encode, pieces_of
from rlstreams.workers.weights.store.sums import Sums, after

if TYPE_CHECKING:
    import torch

T = TypeVar("T")
R = TypeVar("R")
_MAGIC = b"RLWL"
_LENGTH = struct.Struct("<I")
_PIECE = struct.Struct("<BI")
_CHECKSUM_BYTES = hashlib.sha256().digest_size
_MOST_HEADER_BYTES = 1 << 28
_NAME = re.compile(r"v(\d{8,})-([0-9a-f]{12})(?:\.anchor|-on-(\d{8,})-([0-9a-f]{12})\.delta)")
_DIGITS = 12  # of a hash, in a name; the whole hash is in the header
_THREADS = max(1, min(4, (os.cpu_count() or 1) // 2))  # training goes on beside it


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Stamp:
    """A version as file names have it."""

    policy_version: int
    digits: str  # first digits of its hash

    @classmethod
    def of(cls, policy_version: int, weight_hash: str) -> Stamp:
        """The stamp of a version and its hash."""
        return cls(policy_version=policy_version, digits=weight_hash[:_DIGITS])

    def __str__(self) -> str:
        return f"v{self.policy_version:08d}-{self.digits}"


@dataclass(frozen=True, slots=True, kw_only=True)
class FileName:
    """Content of a file by its name."""

    stamp: Stamp
    base: Stamp | None  # None: an anchor

    @classmethod
    def parse(cls, name: str) -> FileName | None:
        """The parsed name; None: it is no file of a version."""
        found = _NAME.fullmatch(name)
        if found is None:
            return None
        version, digits, base, base_digits = found.groups()
        stamp = Stamp(policy_version=int(version), digits=digits)
        if base is None:
            return cls(stamp=stamp, base=None)
        return cls(stamp=stamp, base=Stamp(policy_version=int(base), digits=base_digits))

    def __str__(self) -> str:
        """As `v00000018-0123456789ab.anchor`, `v00000018-0123456789ab-on-v00000017-....delta`."""
        if self.base is None:
            return f"{self.stamp}.anchor"
        return f"{self.stamp}-on-{str(self.base)[1:]}.delta"


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """Header of a file: its version, and its base's."""

    run: str
    policy_version: int
    weight_hash: str
    layout: str
    base_version: int = NO_VERSION
    base_hash: str = ""

    @property
    def name(self) -> FileName:
        """Name of the file."""
        base = Stamp.of(self.base_version, self.base_hash) if self.base_hash else None
        return FileName(stamp=Stamp.of(self.policy_version, self.weight_hash), base=base)


def write(
    out: BinaryIO,
    header: Header,
    tensors: Mapping[str, torch.Tensor],
    base: Mapping[str, torch.Tensor] | None,
) -> tuple[int, str]:
    """Write a version; the file's bytes and checksum.

    Args:
        tensors: on the CPU.
        base: the tensors of `header.base_version`; None: an anchor.
    """
    digest, size = hashlib.sha256(), 0

    def put(data: bytes) -> None:
        nonlocal size
        out.write(data)
        digest.update(data)
        size += len(data)

    text = json.dumps(asdict(header), separators=(",", ":")).encode()
    put(_MAGIC + _LENGTH.pack(len(text)) + text)
    names = sorted(tensors)

    def pairs() -> Iterator[tuple[Words, Words | None]]:
        for name in names:
            olds = [None] if base is None else pieces_of(base[name])
            for number, words in enumerate(pieces_of(tensors[name])):
                yield words, None if base is None else olds[number]

    for form, data in _in_order(pairs(), lambda pair: encode(*pair)):
        put(_PIECE.pack(form, len(data)) + data)
    out.write(digest.digest())
    return size + _CHECKSUM_BYTES, digest.hexdigest()


class VersionFile:
    """Reads a version, front to back; the header at once.

    Raises:
        WeightError: truncated, damaged, or of another version than its name says; names the file.
    """

    def __init__(self, file: BinaryIO, place: str, name: FileName) -> None:
        self._file = file
        self._what = f"{place}/{name} (policy version {name.stamp.policy_version})"
        self._digest = hashlib.sha256()
        self._read_bytes = 0
        if self._take(len(_MAGIC)) != _MAGIC:
            raise self._error("it is no file of a weight store")
        (length,) = _LENGTH.unpack(self._take(_LENGTH.size))
        if length > _MOST_HEADER_BYTES:
            raise self._error(f"a header of {length:,} bytes is none")
        try:
            self.header = Header(**json.loads(self._take(length)))
        except (ValueError, TypeError) as err:
            raise self._error(f"its header cannot be read: {err}") from err
        if self.header.name != name:
            raise self._error(f"its header is that of {self.header.name}")

    def load_into(
        self, tensors: dict[str, torch.Tensor], sums: Sums, check: Callable[[], None]
    ) -> None:
        """Turn the base's tensors into this version's, in place; an anchor adds them.

        After an error they are of no version.

        Args:
            sums: of the base's pieces, as far as they are known; then of this version's.
            check: called between pieces; raises if time is up.
        """
        layout = parse_layout(self.header.layout)
        if self.header.name.base is None:
            tensors.clear()
            tensors.update(empty(layout))
            sums.clear()
        self._check_layout(layout, tensors)

        def pieces() -> Iterator[tuple[int, bytes, Words, str, int]]:
            for name, _, _ in layout:
                split = pieces_of(tensors[name])
                sums.setdefault(name, [None] * len(split))
                for number, words in enumerate(split):
                    form, length = _PIECE.unpack(self._take(_PIECE.size))
                    check()
                    yield form, self._take(length), words, name, number

        def work(piece: tuple[int, bytes, Words, str, int]) -> None:
            form, data, words, name, number = piece
            changed, known = apply(form, data, words), sums[name][number]
            if changed is not None and known is not None:
                sums[name][number] = after(known, changed, words, number)
            else:
                sums[name][number] = None

        try:
            for _ in _in_order(pieces(), work):
                pass
        except DeltaError as err:
            raise self._error(f"damaged before byte {self._read_bytes:,}: {err}") from err
        computed = self._digest.digest()
        if self._file.read(_CHECKSUM_BYTES + 1) != computed:
            raise self._error("its checksum is not that of its content")

    def _check_layout(
        self, layout: Iterable[tuple[str, str, tuple[int, ...]]], found: Mapping[str, torch.Tensor]
    ) -> None:
        rows = {name: (dtype, shape) for name, dtype, shape in layout}
        had = {n: (str(t.dtype).removeprefix("torch."), tuple(t.shape)) for n, t in found.items()}
        if wrong := sorted(n for n in {*rows, *had} if rows.get(n) != had.get(n)):
            raise self._error(f"{wrong[0]} has another dtype or shape in its base")

    def _take(self, num_bytes: int) -> bytes:
        data = self._file.read(num_bytes)
        self._read_bytes += len(data)
        if len(data) != num_bytes:
            raise self._error(f"truncated: it ends at byte {self._read_bytes:,}")
        self._digest.update(data)
        return data

    def _error(self, text: str) -> WeightError:
        return WeightError(f"{self._what}: {text}")


def empty(layout: Iterable[tuple[str, str, tuple[int, ...]]]) -> dict[str, torch.Tensor]:
    """Zero tensors of a layout, to write to."""
    import torch

    return {n: torch.zeros(shape, dtype=getattr(torch, dtype)) for n, dtype, shape in layout}


def _in_order(given: Iterable[T], work: Callable[[T], R]) -> Iterator[R]:
    """Results in order; few are under way at once, because pieces are large."""
    waiting: deque[Future[R]] = deque()
    with ThreadPoolExecutor(_THREADS, "weight-store") as pool:
        for one in given:
            waiting.append(pool.submit(work, one))
            if len(waiting) > 2 * _THREADS:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
