"""Rows of figures as text: JSON lines, written as they come, or one CSV table."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, TextIO

from rlstreams.show.metrics.rows import Row

_FIRST = ("kind", "step", "at")


class JsonLines:
    """A line for each row, complete as soon as it is there."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def write(self, rows: Sequence[Row]) -> None:
        """Write and flush."""
        for row in rows:
            self._file.write(json.dumps(_flat(row)) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Nothing is left to write."""


class CsvTable:
    """One table; its columns are known when the last row is, so nothing is written before."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._rows: list[Row] = []

    def write(self, rows: Sequence[Row]) -> None:
        """Keep the rows."""
        self._rows += rows

    def close(self) -> None:
        """Write the table; what a row does not say is empty."""
        names = sorted({name for row in self._rows for name in row.values})
        writer = csv.DictWriter(self._file, [*_FIRST, *names], lineterminator="\n")
        writer.writeheader()
        writer.writerows(_flat(row) for row in self._rows)
        self._file.flush()


def _flat(row: Row) -> dict[str, Any]:
    at = datetime.fromtimestamp(row.at_ms / 1000, UTC).isoformat(timespec="milliseconds")
    return {"kind": row.kind, "step": row.step, "at": at, **row.values}
