"""Problems from a JSON-lines file: checked at the start, read by offset, ordered by seed and epoch.

A row is a JSON object with `prompt` (text, or a list of chat messages) and `answer`; its other
fields are metadata for the verifier. Blank lines are skipped and have no row number.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from streams.errors import ConfigError

ChatMessages: TypeAlias = list[dict[str, Any]]
_U64 = (1 << 64) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One problem."""

    number: int  # from 0
    place: str  # "file:line", for messages
    prompt: str | ChatMessages
    answer: str
    metadata: str  # JSON object
    num_bytes: int  # of its line


class Dataset:
    """Rows of one file; holds only where each begins.

    Args:
        field: of the configuration, for messages.
        path: the file.
        max_rows: read no further than this many rows; 0: all.

    Raises:
        ConfigError: names the field of the configuration, the file, the line and what is wrong.
    """

    def __init__(self, field: str, path: str, max_rows: int = 0) -> None:
        self._field = field
        self._path = Path(path)
        self._offsets = array("q")
        self._lines = array("q")  # line numbers, from 1
        if not path:
            raise ConfigError(f"{field} is empty; name a file of JSON lines")
        try:
            self._index(max_rows)
        except OSError as err:
            raise ConfigError(f"{field}: cannot read {path!r}: {err.strerror}") from err

    def __len__(self) -> int:
        return len(self._offsets)

    def row(self, number: int) -> Row:
        """Row `number`, read from the file.

        Raises:
            ConfigError: the file was changed since the start.
        """
        with self._path.open("rb") as file:
            file.seek(self._offsets[number])
            return self._parse(file.readline(), number)

    def _index(self, max_rows: int) -> None:
        offset = 0
        with self._path.open("rb") as file:
            for line_number, line in enumerate(file, 1):
                if line.strip():
                    self._offsets.append(offset)
                    self._lines.append(line_number)
                    self._parse(line, len(self) - 1)
                    if len(self) == max_rows:
                        return
                offset += len(line)
        if not len(self):
            raise ConfigError(f"{self._field}: {self._path} has no rows")

    def _parse(self, line: bytes, number: int) -> Row:
        place = f"{self._path}:{self._lines[number]}"
        try:
            fields = json.loads(line)
        except ValueError as err:  # UnicodeDecodeError too
            raise ConfigError(f"{self._field}: {place}: not a line of JSON: {err}") from err
        if not isinstance(fields, dict):
            raise ConfigError(f"{self._field}: {place}: not a JSON object: {_brief(fields)}")
        if "prompt" not in fields:
            known = ", ".join(sorted(fields)) or "none"
            raise ConfigError(f"{self._field}: {place}: no `prompt` (fields: {known})")
        prompt = fields.pop("prompt")
        if not _is_text(prompt) and not _is_chat(prompt):
            raise ConfigError(
                f"{self._field}: {place}: `prompt` must be text that is not empty, or a list of "
                f'messages {{"role": ..., "content": ...}}, got {_brief(prompt)}'
            )
        answer = fields.pop("answer", "")
        return Row(
            number=number,
            place=place,
            prompt=prompt,
            answer=answer if isinstance(answer, str) else json.dumps(answer),
            metadata=json.dumps(fields),
            num_bytes=len(line),
        )


class Order:
    """Which row stands at which position of the endless training order.

    Each epoch is a permutation of all rows, keyed by (seed, epoch): rows sorted by the raw output
    of a Philox generator, whose stream numpy promises to keep.
    """

    def __init__(self, seed: int, num_rows: int) -> None:
        self._seed = seed
        self._num_rows = num_rows
        self._epoch = -1
        self._rows: npt.NDArray[np.intp] = np.zeros(0, np.intp)

    def at(self, position: int) -> tuple[int, int]:
        """Epoch and row at `position`, from 0."""
        epoch, index = divmod(position, self._num_rows)
        return epoch, int(self._permutation(epoch)[index])

    def after(self, epoch: int, rows: Collection[int]) -> int:
        """The position behind the last one of `rows` in `epoch`; of no rows the epoch's first."""
        taken = np.isin(self._permutation(epoch), np.fromiter(rows, np.intp, len(rows)))
        last = np.flatnonzero(taken)
        return epoch * self._num_rows + (int(last[-1]) + 1 if len(last) else 0)

    def _permutation(self, epoch: int) -> npt.NDArray[np.intp]:
        if epoch != self._epoch:
            key = np.array([self._seed & _U64, epoch], np.uint64)
            noise = np.random.Philox(key=key).random_raw(self._num_rows)
            self._rows = np.argsort(noise, kind="stable")
            self._epoch = epoch
        return self._rows


def _is_text(prompt: object) -> bool:
    return isinstance(prompt, str) and prompt != ""


def _is_chat(prompt: object) -> bool:
    return (
        isinstance(prompt, list)
        and len(prompt) > 0
        and all(isinstance(m, dict) and "role" in m and "content" in m for m in prompt)
    )


def _brief(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else text[:77] + "..."
