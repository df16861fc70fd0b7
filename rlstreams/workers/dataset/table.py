"""Rows of a source, checked once, as an Arrow table; and the table's splits.

A small file of JSON lines is read at each start. The table of anything else is kept in the cache,
under all that decides what is in it, and mapped from there: a start reads no row, memory does not
grow with the data, and a run sees the same rows although a file or a hub changes.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rlstreams.streams.digests import json_sha256
from rlstreams.streams.log.cache import cache_folder
from rlstreams.streams.log.errors import ConfigError
from rlstreams.streams.synced import beside
from rlstreams.workers.dataset.identity import shape_of
from rlstreams.workers.dataset.limits import PromptLimits
from rlstreams.workers.dataset.row import PromptText, Row, RowReader, parse
from rlstreams.workers.dataset.sources import RowFormat, Source, numbered_rows

KEPT_FROM_BYTES = 32 << 20  # a smaller file is read in a moment
_VERSION = 3  # of a table's content
_BATCH_BYTES = 8 << 20
_PROGRESS_S = 5.0
_Signature = tuple[int, int, int]
_COLUMNS = {"line": "uint32", "left_out": "string", "prompt": "uint64", "row": "binary"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Dataset:
    """One split: the rows of a table that are its own."""

    source: Source
    reader: RowReader
    table: Any  # pyarrow.Table with a row for each one that was read, see `Pass._batches`
    numbers: npt.NDArray[np.uint32]  # rows of the table, in its order

    def __len__(self) -> int:
        return len(self.numbers)

    def place(self, number: int) -> str:
        """`file:line` of a row, else `name: row`."""
        return self.source.place(self._value("line", number))

    def row(self, number: int) -> Row:
        """Row `number`, from 0."""
        place = self.place(number)
        fields = parse(self._value("row", number), place, self.source.field)
        return self.reader.row(fields, number, place)

    def prompts(self) -> npt.NDArray[np.uint64]:
        """Digests of the bare prompts, by which splits are compared."""
        found: npt.NDArray[np.uint64] = self.table["prompt"].to_numpy()[self.numbers]
        return found

    def skipped(self) -> list[str]:
        """Rows that were left out, in words."""
        counts = self.table["left_out"].value_counts().to_pylist()
        return [f"{c['counts']:,} skipped as {c['values']}" for c in counts if c["values"]]

    def _value(self, column: str, number: int) -> Any:  # noqa: ANN401
        return self.table[column][int(self.numbers[number])].as_py()


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """A pass over a source: all that decides the content of its table."""

    source: Source
    reader: RowReader
    limits: PromptLimits
    progress: Callable[[str], None] = field(default=lambda _: None)

    def dataset(self) -> Dataset:
        """All rows that stay.

        Raises:
            ConfigError: names field, file and line, and what is wrong there.
        """
        import pyarrow.compute

        source, table = self.source, self._table()
        if not len(table):
            raise ConfigError(f"{source.field}: {source.name} has no rows")
        stays = pyarrow.compute.equal(table["left_out"], "").to_numpy()
        dataset = Dataset(
            source=source,
            reader=self.reader,
            table=table,
            numbers=np.flatnonzero(stays).astype(np.uint32),
        )
        if not len(dataset):
            raise ConfigError(
                f"{source.field}: {source.name}: {len(table):,} rows: "
                f"{', '.join(dataset.skipped())}; none is left"
            )
        return dataset

    def _table(self) -> Any:  # noqa: ANN401
        import pyarrow

        source, shape = self.source, shape_of(self.source.data)
        try:
            before = [_signature(path) for path in source.files()]
            if source.kind is RowFormat.JSON_LINES and before[0][0] < KEPT_FROM_BYTES:
                return pyarrow.Table.from_batches(self._batches(before), _schema())
            known = [_VERSION, source.kind, source.digest(), shape, self.limits.key]
            path = cache_folder() / "tables" / f"{json_sha256(known)}.arrow"
            try:
                return _mapped(path)
            except (
                FileNotFoundError,
                NotADirectoryError,
                pyarrow.ArrowInvalid,
            ):  # the latter after a power cut
                self._write(path, before)
            return _mapped(path)
        except OSError as err:
            raise self._unreadable(err) from err

    def _write(self, path: Path, before: Sequence[_Signature]) -> None:
        import pyarrow.ipc

        batches = self._read_batches(before)
        try:
            with (
                beside(path) as unfinished,
                pyarrow.ipc.new_file(str(unfinished), _schema()) as writer,
            ):
                for batch in batches:
                    writer.write_batch(batch)
        except OSError as err:
            raise ConfigError(
                f"{self.source.field}: the table of its rows cannot be kept in {path.parent} "
                f"({err.strerror or err}): make room there, or name a folder that you may write "
                "in RLSTREAMS_CACHE"
            ) from err

    def _read_batches(self, before: Sequence[_Signature]) -> Iterator[Any]:
        try:
            yield from self._batches(before)
        except OSError as err:
            raise self._unreadable(err) from err

    def _unreadable(self, err: OSError) -> ConfigError:
        source = self.source
        return ConfigError(f"{source.field}: cannot read {source.name!r}: {err.strerror or err}")

    def _batches(self, before: Sequence[_Signature]) -> Iterator[Any]:
        """Every row: its line, why it is left out, the digest of its bare prompt, its JSON."""
        source, reader = self.source, self.reader
        rows: list[tuple[int, str, int, bytes]] = []
        size, next_s = 0, time.monotonic() + _PROGRESS_S
        first: tuple[str, str] | None = None  # kind and place
        for number, (line, text) in enumerate(numbered_rows(source, reader.columns), 1):
            place = source.place(line)
            fields = parse(text, place, source.field)
            prompt = reader.bare_prompt(fields, place)
            kind = "text" if isinstance(prompt, str) else "a list of messages"
            first = first or (kind, place)
            if kind != first[0]:  # two data sets by mistake
                raise ConfigError(
                    f"{source.field}: {place}: the prompt is {kind}, but that of {first[1]} is "
                    f"{first[0]}: make all of one kind"
                )
            reader.check_rest(fields, place)
            reason = self.limits.reason(reader, prompt, len(text), f"{source.field}: {place}")
            rows.append((line, reason, _digest(prompt), b"" if reason else text))
            size += len(text)
            if size > _BATCH_BYTES:
                yield _batch(rows)
                rows, size = [], 0
                if time.monotonic() > next_s:
                    next_s += _PROGRESS_S
                    self.progress(f"{source.field}: {source.name}: {number:,} rows read")
        if rows:
            yield _batch(rows)
        if [_signature(path) for path in source.files()] != before:
            raise ConfigError(f"{source.field}: {source.name} was written while it was read")


def hold_out(whole: Dataset, num_rows: int, fraction: float) -> tuple[Dataset, Dataset]:
    """The rows to train on, and those to hold out: as many as asked for, or this share.

    Held out are the prompts with the smallest digests, the first row of each; its copies are in
    neither. So the same rows are held out whatever the seed and the order of the file, and copies
    of one never end on both sides.

    Raises:
        ConfigError: one of the two would be empty.
    """
    prompts = whole.prompts()
    different, first = np.unique(prompts, return_index=True)
    bound = np.uint64(min(round(fraction * (1 << 64)), (1 << 64) - 1))
    wanted = num_rows or int(np.searchsorted(different, bound))
    if not 0 < wanted < len(different):
        raise ConfigError(
            f"data.held_out_{'rows' if num_rows else 'fraction'} is {num_rows or fraction}: of "
            f"{len(different):,} different prompts of {whole.source.name} it would hold out "
            f"{wanted:,}; both splits need one: change it, add rows, or set it to 0 (no evaluation)"
        )
    train = whole.numbers[prompts > different[wanted - 1]]
    held_out = whole.numbers[np.sort(first[:wanted])]
    return replace(whole, numbers=train), replace(whole, numbers=held_out)


def check_disjoint(train: Dataset, held_out: Dataset) -> None:
    """Check that no prompt is in both.

    Raises:
        ConfigError: says how many are, and names the first.
    """
    ours, theirs = train.prompts(), held_out.prompts()
    both = np.flatnonzero(np.isin(ours, theirs))
    if len(both):
        count = int(np.isin(theirs, ours[both]).sum())
        number = int(np.flatnonzero(theirs == ours[both[0]])[0])
        raise ConfigError(
            f"data.held_out: {count:,} of {len(held_out):,} prompts are in data.train too, first "
            f"{held_out.place(number)}, which is {train.place(int(both[0]))}: remove them there, "
            "or let data.held_out_rows keep rows of data.train out"
        )


def _signature(path: Path) -> _Signature:
    """Values that change when a file is written or replaced: size, time of change in ns, inode."""
    found = path.stat()
    return found.st_size, found.st_mtime_ns, found.st_ino


def _schema() -> Any:  # noqa: ANN401
    import pyarrow

    return pyarrow.schema(_COLUMNS)


def _batch(rows: Sequence[tuple[int, str, int, bytes]]) -> Any:  # noqa: ANN401
    import pyarrow

    columns = zip(zip(*rows, strict=True), _COLUMNS.values(), strict=True)
    # Of numpy's arrays: of lists pyarrow would import pandas.
    arrays = [pyarrow.array(np.array(values, object), kind) for values, kind in columns]
    return pyarrow.record_batch(arrays, schema=_schema())


def _mapped(path: Path) -> Any:  # noqa: ANN401
    import pyarrow.ipc

    return pyarrow.ipc.open_file(pyarrow.memory_map(str(path))).read_all()


def _digest(prompt: PromptText) -> int:
    """BLAKE2b-64."""
    text = prompt if isinstance(prompt, str) else json.dumps(prompt, sort_keys=True)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
