"""Rows to a file, batch by batch: Parquet, or JSON lines with the same columns and types."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, TextIO

import pyarrow as pa
import pyarrow.parquet as pq

from rlstreams.streams.log.errors import ConfigError
from rlstreams.streams.log.text import plain_json

SUFFIXES = (".parquet", ".jsonl")
STDOUT = "-"
_BATCH_ROWS = 500
_UNFINISHED = ".part"


def check_name(name: str) -> None:
    """Refuse what is no name of a file that this writes.

    Raises:
        ConfigError: another suffix.
    """
    if name != STDOUT and Path(name).suffix not in SUFFIXES:
        raise ConfigError(
            f"--out must end in {' or '.join(SUFFIXES)}, or be {STDOUT} for JSON lines on "
            f"standard output, got {name!r}"
        )


def write(rows: Iterator[Mapping[str, Any]], schema: pa.Schema, name: str) -> int:
    """Write all rows; the file has its name only once it is whole.

    Args:
        rows: values by column; a missing one is null.
        name: of a file, whose suffix says the format; or `-`.

    Returns:
        How many rows there were.
    """
    check_name(name)
    if name == STDOUT:
        return _write_json(rows, schema, sys.stdout)
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(path.name + _UNFINISHED)
    try:
        if path.suffix == ".parquet":
            num_rows = _write_parquet(rows, schema, unfinished)
        else:
            with unfinished.open("w", encoding="utf-8") as file:
                num_rows = _write_json(rows, schema, file)
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)
    return num_rows


def batches(rows: Iterator[Mapping[str, Any]], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """Rows as Arrow record batches; a missing value is null."""
    while chunk := list(itertools.islice(rows, _BATCH_ROWS)):
        yield pa.RecordBatch.from_pylist(chunk, schema=schema)


def _write_parquet(rows: Iterator[Mapping[str, Any]], schema: pa.Schema, path: Path) -> int:
    num_rows = 0
    with pq.ParquetWriter(path, schema, compression="zstd") as writer:
        for batch in batches(rows, schema):
            writer.write_batch(batch)
            num_rows += batch.num_rows
    return num_rows


def _write_json(rows: Iterator[Mapping[str, Any]], schema: pa.Schema, file: TextIO) -> int:
    num_rows = 0
    for batch in batches(rows, schema):
        for row in batch.to_pylist():
            file.write(plain_json(row, default=datetime.isoformat) + "\n")
        num_rows += batch.num_rows
    return num_rows
