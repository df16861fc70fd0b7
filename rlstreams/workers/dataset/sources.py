"""Sources of data that `[data]` names: a file, a folder, a hub's data set, a gym's task."""

from __future__ import annotations

import csv
import importlib.metadata
import importlib.util
import itertools
import json
import re
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from rlstreams.streams.digests import file_sha256, json_sha256
from rlstreams.streams.log.errors import ConfigError
from rlstreams.streams.log.secrets import resolve_secret
from rlstreams.workers.config.data import GYM, HUB, DataSection
from rlstreams.workers.config.nearest import meant_path
from rlstreams.workers.dataset.files import LINE_BYTES, checked_length, numbered_lines
from rlstreams.workers.dataset.row import Fields

_HUB_NAME = re.compile(r"hf:([^:@]+)(?::([^:@]+))?(?:@([^@]+))?")
SEPARATORS = {".csv": ",", ".tsv": "\t"}  # of tables of text, by ending
_SAVED = ("state.json", "dataset_dict.json")  # files that `save_to_disk` leaves


class RowFormat(StrEnum):
    """Format of a source's rows."""

    JSON_LINES = "json-lines"
    PARQUET = "parquet"
    TABLE = "table"  # of text: its first line names the columns, all its values are text
    SAVED = "saved"  # by `datasets`
    HUB = "hub"
    GYM = "gym"


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A source of rows, by its name in the configuration."""

    field: str  # of the configuration
    kind: RowFormat
    name: str
    data: DataSection
    path: Path = Path()  # of files
    subset: str = ""  # of hub data sets
    split: str = ""

    def place(self, number: int) -> str:
        """`file:line`, or `name: row`, for messages."""
        own = self.kind is RowFormat.JSON_LINES
        return f"{self.path}:{number}" if own else f"{self.name}: row {number}"

    def files(self) -> Sequence[Path]:
        """The user's own files; a hub's data set and a gym's task have none."""
        if self.kind in (RowFormat.HUB, RowFormat.GYM):
            return ()
        return (
            [self.path]
            if self.path.is_file()
            else sorted(p for p in self.path.rglob("*") if p.is_file())
        )

    def digest(self) -> str:
        """Digest of the content: of files by their bytes, of others by the settings that make them.

        Raises:
            ConfigError: a file cannot be read.
        """
        try:
            return self._digest()
        except OSError as err:
            raise ConfigError(f"{self.field}: cannot read {self.name!r}: {err.strerror}") from err

    def _digest(self) -> str:
        if self.kind is RowFormat.JSON_LINES:
            return file_sha256(self.path)
        if self.kind is RowFormat.GYM:
            gym = self.data.gym
            known = [gym.rows, gym.seed, gym.options, _version("reasoning-gym")]
        elif self.kind is RowFormat.HUB:
            known = [self.subset, self.split, self.data.revision]
        else:
            below = self.path if self.path.is_dir() else self.path.parent
            return json_sha256([[str(f.relative_to(below)), file_sha256(f)] for f in self.files()])
        return json_sha256([self.name, *known])


def source_of(data: DataSection, field: str, named_by: str = "") -> Source:
    """The source that `data.train` or `data.held_out` names.

    Args:
        field: `data.train` or `data.held_out`.
        named_by: name in messages, instead of the field's.

    Raises:
        ConfigError: nothing is named, or nothing has that name.
    """
    name, split = (data.train, "train") if field == "data.train" else (data.held_out, "test")
    field = named_by or field
    if not name:
        raise ConfigError(
            f"{field} is empty; name a file of JSON lines, Parquet or CSV, hf:NAME or gym:TASK"
        )
    if name.startswith(GYM):
        return Source(field=field, kind=RowFormat.GYM, name=name.removeprefix(GYM), data=data)
    if name.startswith(HUB):
        if (match := _HUB_NAME.fullmatch(name)) is None:
            raise ConfigError(f"{field} must be hf:NAME[:SUBSET][@SPLIT], got {name!r}")
        split = match[3] or split
        return Source(
            field=field,
            kind=RowFormat.HUB,
            name=match[1],
            data=data,
            subset=match[2] or "",
            split=split,
        )
    path = Path(name)
    if not path.exists():
        raise ConfigError(f"{field}: there is no file {name!r}{meant_path(name)}")
    return Source(field=field, kind=_kind_of(path, field), name=name, data=data, path=path)


def numbered_rows(source: Source, columns: Sequence[str]) -> Iterator[tuple[int, bytes]]:
    """Each row as JSON, with the number of its line or row, from 1; without blank lines.

    Args:
        columns: to read, of sources that name theirs; empty: all.

    Raises:
        ConfigError: it cannot be read, needs a package that is not installed, or holds what JSON
            cannot say.
    """
    if source.kind is RowFormat.JSON_LINES:
        try:
            with source.path.open("rb", buffering=1 << 20) as file:
                for number, line in numbered_lines(file, f"{source.field}: {source.path}"):
                    if not line.isspace():
                        yield number, line
        except OSError as err:
            raise ConfigError(
                f"{source.field}: cannot read {source.name!r}: {err.strerror}"
            ) from err
        return
    readers = {
        RowFormat.PARQUET: _parquet,
        RowFormat.TABLE: _table,
        RowFormat.SAVED: _saved,
        RowFormat.HUB: _hub,
        RowFormat.GYM: _gym,
    }
    for number, fields in enumerate(readers[source.kind](source, columns), 1):
        place = f"{source.field}: {source.place(number)}"
        yield number, checked_length(_line(fields, place).encode(), place)


def first_parquet_rows(path: Path, field: str, count: int) -> tuple[list[Fields], int]:
    """The first rows of a file, and how many it has.

    Raises:
        ConfigError: it is no Parquet.
    """
    import pyarrow.parquet

    source = Source(
        field=field, kind=RowFormat.PARQUET, name=str(path), data=DataSection(), path=path
    )
    rows = list(itertools.islice(_parquet(source, ()), count))
    return rows, pyarrow.parquet.read_metadata(path).num_rows


def _kind_of(path: Path, field: str) -> RowFormat:
    if path.is_file():
        if path.suffix.lower() in SEPARATORS:
            return RowFormat.TABLE
        return RowFormat.PARQUET if path.suffix == ".parquet" else RowFormat.JSON_LINES
    if any((path / name).is_file() for name in _SAVED):
        return RowFormat.SAVED
    if any(path.glob("*.parquet")):
        return RowFormat.PARQUET
    raise ConfigError(
        f"{field}: folder {str(path)!r} has neither Parquet files nor what `save_to_disk` of "
        "`datasets` writes"
    )


def _parquet(source: Source, columns: Sequence[str]) -> Iterator[Fields]:
    import pyarrow
    import pyarrow.parquet

    files = [source.path] if source.path.is_file() else sorted(source.path.glob("*.parquet"))
    for path in files:
        try:
            with pyarrow.parquet.ParquetFile(path) as file:
                known = file.schema_arrow.names
                if missing := [name for name in columns if name not in known]:
                    raise ConfigError(
                        f"{source.field}: {path}: no column {missing[0]!r} "
                        f"(columns: {', '.join(known)})"
                    )
                for batch in file.iter_batches(batch_size=1024, columns=list(columns) or None):
                    yield from batch.to_pylist()
        except (pyarrow.ArrowException, OSError) as err:
            raise ConfigError(f"{source.field}: {path}: no readable Parquet: {err}") from err


def _table(source: Source, columns: Sequence[str]) -> Iterator[Fields]:
    """Rows of CSV or TSV as RFC 4180 has them; a row of another length is refused by number."""
    del columns  # it is read line by line
    csv.field_size_limit(LINE_BYTES)
    try:
        with source.path.open(encoding="utf-8-sig", newline="") as file:
            rows = csv.DictReader(file, delimiter=SEPARATORS[source.path.suffix.lower()])
            known = rows.fieldnames or []
            for number, row in enumerate(rows, 1):
                if None in row or None in row.values():
                    raise ConfigError(
                        f"{source.field}: {source.place(number)}: it has not the {len(known)} "
                        f"columns of the first line ({', '.join(known)})"
                    )
                yield dict(row)
    except (OSError, ValueError, csv.Error) as err:
        raise ConfigError(f"{source.field}: {source.path}: no readable table: {err}") from err


def _saved(source: Source, columns: Sequence[str]) -> Iterator[Fields]:
    _need("datasets", "hub", source)
    import datasets

    found = datasets.load_from_disk(str(source.path))
    if isinstance(found, datasets.DatasetDict):
        splits = ", ".join(str(source.path / name) for name in found)
        raise ConfigError(f"{source.field}: {source.name} holds several splits; name one: {splits}")
    yield from found.select_columns(list(columns)) if columns else found


def _hub(source: Source, columns: Sequence[str]) -> Iterator[Fields]:
    _need("datasets", "hub", source)
    import datasets

    data = source.data
    try:
        found = datasets.load_dataset(
            source.name,
            source.subset or None,
            split=source.split,
            revision=data.revision or None,
            token=resolve_secret(data.token, "data.token") or None,
        )
    # Without a connection huggingface_hub goes on with a client that it has closed: RuntimeError.
    except (ValueError, OSError, RuntimeError, datasets.exceptions.DatasetsError) as err:
        why = str(err).rstrip(".")
        raise ConfigError(
            f"{source.field}: hf:{source.name} cannot be loaded: {why}; check the name and the "
            "connection, or name a file"
        ) from err
    yield from found.select_columns(list(columns)) if columns else found


def _gym(source: Source, columns: Sequence[str]) -> Iterator[Fields]:
    del columns  # made by us
    _need("reasoning_gym", "gym", source)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)  # in the sources of what it builds on
        import reasoning_gym
        from reasoning_gym.factory import DATASETS

    gym = source.data.gym
    if source.name not in DATASETS:
        import difflib

        close = difflib.get_close_matches(source.name, DATASETS, n=3) or sorted(DATASETS)[:5]
        raise ConfigError(
            f"{source.field}: reasoning-gym has no task {source.name!r}; did you mean "
            f"{', '.join(close)}?"
        )
    try:
        task = reasoning_gym.create_dataset(
            source.name, size=gym.rows, seed=gym.seed, **gym.options
        )
    except (TypeError, AssertionError, ValueError) as err:
        raise ConfigError(f"data.gym.options: task {source.name}: {err}") from err
    for number in range(gym.rows):
        entry = task[number]
        # The scorer's fields lie together, away from names that mean something to us.
        yield {"prompt": entry["question"], "answer": entry["answer"], "gym": entry["metadata"]}


def _need(package: str, extra: str, source: Source) -> None:
    if importlib.util.find_spec(package) is None:
        raise ConfigError(
            f"{source.field}: {source.kind} data set {source.name!r} needs a package that is not "
            f"installed: pip install 'rlstreams[{extra}]'"
        )


def _line(fields: Fields, place: str) -> str:
    try:
        return json.dumps(fields, ensure_ascii=False, default=_plain)
    except TypeError as err:
        raise ConfigError(
            f"{place}: {err}; name the columns to keep in data.columns.metadata"
        ) from err


def _plain(value: object) -> Any:  # noqa: ANN401
    """JSON form of values that JSON does not know: numpy's numbers and arrays, times."""
    if isinstance(value, bytes):
        raise TypeError("a column holds bytes")
    if isinstance(value, set | frozenset):
        return sorted(value)
    plain = getattr(value, "tolist", None)
    return plain() if plain else str(value)


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
