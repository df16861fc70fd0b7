"""The first pass over a file of JSON lines: every row is checked once, and its place written down.

A small file is indexed anew at each start. The index of a large one is kept in the cache, under all
that decides what is in it; so the next start reads no row.
"""

from __future__ import annotations

import hashlib
import io
import json
import shutil
import struct
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import numpy as np
import numpy.typing as npt

from rlstreams.streams.log.cache import cache_folder
from rlstreams.streams.log.errors import ConfigError
from rlstreams.workers.dataset.files import (
    REMEMBERED_BYTES,
    content_hash,
    numbered_lines,
    signature,
)
from rlstreams.workers.dataset.index import ENTRY, Entry, Index, IndexFacts, Split, digest
from rlstreams.workers.dataset.limits import Limits
from rlstreams.workers.dataset.row import Fields, PromptText, RowReader, brief
from rlstreams.workers.dataset.split import Share, divide

_VERSION = 2  # of what an index holds
_FACTS, _ROWS = "facts.json", "rows"
_TRAIN, _HELD_OUT = "train.npy", "held_out.npy"
_ALSO_HELD_OUT = "also held out"  # as indexes that are kept have it
_PROGRESS_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """All that decides what an index holds."""

    name: str  # of the field of the configuration
    title: str  # what the user called it
    path: Path
    reader: RowReader
    limits: Limits
    share: Share  # kept out to evaluate on
    shape: Mapping[str, Any]  # of the data section
    progress: Callable[[str], None] = field(default=lambda _: None)

    def place(self, line: int) -> str:
        """`file:line` in the user's own file, else `name: row`."""
        own = str(self.path) == self.title
        return f"{self.path}:{line}" if own else f"{self.title}: row {line}"


def open_index(wanted: Pass) -> Index:
    """The index of a file: the one that is kept, or a new one.

    Raises:
        ConfigError: names field, file and line, and what is wrong there.
    """
    try:
        size = signature(wanted.path).size
        if size < REMEMBERED_BYTES:
            file = io.BytesIO()
            facts = _scanned(wanted, file)
            rows = np.frombuffer(file.getvalue(), ENTRY)
            return _divided(wanted, facts, rows, len(rows))
        return _kept(wanted)
    except OSError as err:
        raise ConfigError(f"{wanted.name}: cannot read {wanted.title!r}: {err.strerror}") from err


def parse(line: str | bytes, place: str, field: str) -> Fields:
    """The fields of a line.

    Raises:
        ConfigError: names the place, with the column, and what is there.
    """
    try:
        fields = json.loads(line)
    except json.JSONDecodeError as err:
        column = min(err.pos, len(err.doc.rstrip())) + 1  # a line that was cut ends in its newline
        raise ConfigError(f"{field}: {place}:{column}: not a line of JSON: {err.msg}") from err
    except ValueError as err:  # UnicodeDecodeError
        raise ConfigError(f"{field}: {place}: not a line of JSON: {err}") from err
    except RecursionError as err:
        raise ConfigError(f"{field}: {place}: nested too deeply") from err
    if not isinstance(fields, dict):
        raise ConfigError(f"{field}: {place}: not a JSON object: {brief(fields)}")
    _check_spelled(fields, place, field)
    return fields


def _check_spelled(fields: Fields, place: str, field: str) -> None:
    """Half of a surrogate pair is an escape that stands for no character: nothing can send it."""
    for name, value in fields.items():
        try:
            json.dumps([name, value], ensure_ascii=False).encode()
        except UnicodeEncodeError as err:
            raise ConfigError(
                f"{field}: {place}: `{brief(name)[1:-1]}` has {err.object[err.start]!a}, half of "
                "a character; write the character itself, or both halves"
            ) from err


def _kept(wanted: Pass) -> Index:
    folder = cache_folder() / "indexes" / _key(wanted)
    facts = _facts_in(folder)
    if facts is None:
        shutil.rmtree(folder, ignore_errors=True)  # what a power cut left of one
        facts = _made(wanted, folder)
    rows, held_out = folder / _ROWS, folder / _HELD_OUT
    return Index(
        facts=facts,
        train=Split(rows, np.load(folder / _TRAIN, mmap_mode="r")),
        held_out=Split(rows, np.load(held_out, mmap_mode="r")) if held_out.exists() else None,
    )


def _made(wanted: Pass, folder: Path) -> IndexFacts:
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Not by the process id: in containers each start has the same, and may have been killed.
    beside = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", dir=folder.parent))
    try:
        with (beside / _ROWS).open("wb") as rows:
            facts = _scanned(wanted, rows)
        num_rows = (beside / _ROWS).stat().st_size // ENTRY.itemsize
        index = _divided(wanted, facts, beside / _ROWS, num_rows)
        np.save(beside / _TRAIN, index.train.numbers)
        if index.held_out is not None:
            np.save(beside / _HELD_OUT, index.held_out.numbers)
        (beside / _FACTS).write_bytes(msgspec.json.encode(index.facts))
        beside.chmod(0o755)
        try:
            beside.rename(folder)
        except OSError:  # another process was as quick, with the same content
            if _facts_in(folder) is None:
                raise
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    return index.facts


def _facts_in(folder: Path) -> IndexFacts | None:
    try:
        return msgspec.json.decode((folder / _FACTS).read_bytes(), type=IndexFacts)
    except (FileNotFoundError, msgspec.DecodeError):
        return None


def _key(wanted: Pass) -> str:
    known = [
        _VERSION,
        str(wanted.path.resolve()),
        list(signature(wanted.path)),
        dict(wanted.shape),
        wanted.limits.key,
        [wanted.share.num_rows, wanted.share.fraction],
    ]
    return hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()


def _scanned(wanted: Pass, rows: BinaryIO) -> IndexFacts:
    """Write the entry of every row that stays."""
    before = signature(wanted.path)
    left_out: Counter[str] = Counter()
    num_read = _read(wanted, rows, left_out)
    if not num_read:
        raise ConfigError(f"{wanted.name}: {wanted.title} has no rows")
    if num_read == left_out.total():
        raise ConfigError(
            f"{wanted.name}: {wanted.title}: {num_read:,} rows: {', '.join(skipped(left_out))}; "
            "none is left"
        )
    content = content_hash(wanted.path)
    if signature(wanted.path) != before:
        raise ConfigError(f"{wanted.name}: {wanted.title} was written while it was read")
    return IndexFacts(content=content, num_read=num_read, left_out=dict(left_out))


def _divided(
    wanted: Pass, facts: IndexFacts, rows: npt.NDArray[np.void] | Path, num_rows: int
) -> Index:
    """The splits of all entries."""
    whole = Split(rows, np.arange(num_rows, dtype=np.uint32))
    if not wanted.share:
        return Index(facts=facts, train=whole, held_out=None)
    train, held_out = divide(whole, wanted.share, wanted.title)
    if num_copies := num_rows - len(train) - len(held_out):
        facts = replace(facts, left_out={**facts.left_out, _ALSO_HELD_OUT: num_copies})
    return Index(facts=facts, train=Split(rows, train), held_out=Split(rows, held_out))


def skipped(left_out: Mapping[str, int]) -> list[str]:
    """Rows left out, in words."""
    copies = {_ALSO_HELD_OUT: "copies of held-out prompts"}
    return [f"{n:,} skipped as {copies.get(reason, reason)}" for reason, n in left_out.items()]


def _read(wanted: Pass, rows: BinaryIO, left_out: Counter[str]) -> int:
    """Every row, once; how many there are."""
    pack = struct.Struct("<qQQII").pack  # as `ENTRY`
    num_read = offset = 0
    same_kind = _SameKind(wanted)
    next_s = time.monotonic() + _PROGRESS_S
    with wanted.path.open("rb", buffering=1 << 20) as file:
        for line_number, line in numbered_lines(file, f"{wanted.name}: {wanted.path}"):
            start, offset = offset, offset + len(line)
            if line.isspace():
                continue
            num_read += 1
            fields = _fields(line, line_number, wanted)
            prompt = wanted.reader.bare_prompt(fields, wanted.place(line_number))
            same_kind.check(prompt, line_number)
            wanted.reader.check_rest(fields, wanted.place(line_number))
            if reason := wanted.limits.reason(
                wanted.reader, prompt, len(line), f"{wanted.name}: {wanted.place(line_number)}"
            ):
                left_out[reason] += 1
                continue
            prompt_digest = digest(_canonical(prompt))
            rows.write(pack(*Entry(start, digest(line), prompt_digest, line_number, len(line))))
            if num_read % 4096 == 0 and time.monotonic() > next_s:
                next_s += _PROGRESS_S
                wanted.progress(f"{wanted.name}: {wanted.title}: {num_read:,} rows indexed")
    return num_read


def _fields(line: bytes, line_number: int, wanted: Pass) -> Fields:
    try:
        fields = msgspec.json.decode(line)  # five times as fast as the library's
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        fields = None  # it refuses NaN, too
    if not isinstance(fields, dict):
        return parse(line, wanted.place(line_number), wanted.name)
    return fields


class _SameKind:
    """Prompts are all text or all messages: a file with both is two data sets by mistake."""

    def __init__(self, wanted: Pass) -> None:
        self._wanted = wanted
        self._first: tuple[str, int] | None = None

    def check(self, prompt: PromptText, line_number: int) -> None:
        kind = "text" if isinstance(prompt, str) else "a list of messages"
        if self._first is None:
            self._first = (kind, line_number)
        elif self._first[0] != kind:
            place, other = self._wanted.place, self._first
            raise ConfigError(
                f"{self._wanted.name}: {place(line_number)}: the prompt is {kind}, but that of "
                f"{place(other[1])} is {other[0]}: make all of one kind"
            )


def _canonical(prompt: PromptText) -> bytes:
    return (
        prompt.encode() if isinstance(prompt, str) else json.dumps(prompt, sort_keys=True).encode()
    )
