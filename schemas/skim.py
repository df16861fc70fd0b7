"""Read a few fields of many records and step over the rest, without building the events.

A reader that only accounts for records (the audit) needs a handful of integers of each. Fields come
as columns: an array with an entry for each record, or for each item of an array of records.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from rlstreams.schemas.avro import fingerprint, schema_text
from rlstreams.schemas.binary import (
    HEADER_BYTES,
    MARKER,
    NO_TEXTS,
    DecodeError,
    SchemaTexts,
    decode,
    encode,
)
from rlstreams.schemas.skim_plan import Columns, Plan
from rlstreams.schemas.tensor import Buffer
from rlstreams.schemas.walk import Numbers, Walk

_UNWRITABLE = (TypeError, ValueError, AttributeError, OverflowError, struct.error)


@dataclass(frozen=True, slots=True)
class Texts:
    """A column of texts, which stay bytes of their records."""

    joined: bytes
    begin: Numbers
    end: Numbers

    def slices(self) -> list[bytes]:
        """Each of them."""
        joined = self.joined
        pairs = zip(self.begin.tolist(), self.end.tolist(), strict=True)
        return [joined[begin:end] for begin, end in pairs]

    def only(self, which: Numbers) -> Texts:
        """Some of them."""
        return Texts(self.joined, self.begin[which], self.end[which])

    def are(self, text: bytes) -> npt.NDArray[np.bool_]:
        """Which are equal to `text`."""
        bytes_ = np.frombuffer(self.joined, np.uint8)
        found: npt.NDArray[np.bool_] = self.end - self.begin == len(text)
        for index, byte in enumerate(text):
            found &= bytes_.take(self.begin + index, mode="clip") == byte
        return found

    def naturals(self, max_digits: int) -> Numbers:
        """Each as the decimal number that it is; -1: not one, or with too many digits or a zero."""
        bytes_ = np.frombuffer(self.joined, np.uint8)
        sizes = self.end - self.begin
        found = np.zeros(len(sizes), np.int64)
        is_number = (sizes > 0) & (sizes <= max_digits)
        largest = int(sizes[is_number].max()) if is_number.any() else 0
        for index in range(largest):
            digit = bytes_.take(self.begin + index, mode="clip") - np.uint8(ord("0"))
            inside = sizes > index
            is_number &= (digit < 10) | ~inside
            if not index:
                is_number &= (digit > 0) | (sizes == 1)
            found = np.where(inside, found * 10 + digit, found)
        return np.where(is_number, found, -1)


@dataclass(frozen=True, slots=True)
class Skim:
    """Columns of the records that could be read; `errors` says of the others why not."""

    records: list[int]  # which of the values, in order
    errors: dict[int, DecodeError]
    numbers: dict[str, Numbers] = field(default_factory=dict)  # by path; booleans too
    texts: dict[str, Texts] = field(default_factory=dict)
    # By path of an array: the record that holds each item, as an index into `records`, in order.
    owners: dict[str, Numbers] = field(default_factory=dict)


class Skimmer:
    """Reads the fields `paths` of records of `cls`.

    A path names a field, or with dots one of a record within; through an array of records it gives
    an entry for each item. Wanted may be integers, texts, booleans, and arrays of integers of which
    the first item counts (`token_ids.shape`: the number of tokens; 0: there is none).

    Raises:
        TypeError: a path that the event does not have, or that leads to none of these.
    """

    def __init__(self, cls: type, paths: Sequence[str]) -> None:
        self._cls = cls
        self._plan = Plan(cls, paths)
        self._header = MARKER + fingerprint(schema_text(cls.__name__))

    def __call__(self, values: Sequence[Buffer], schemas: SchemaTexts = NO_TEXTS) -> Skim:
        """The wanted columns of a batch of records.

        Each record is walked to its end, so one that was cut or damaged is noticed as far as
        lengths go; what is stepped over is not looked at. One that is not as this release writes it
        (an older or a newer schema, blocks with sizes) is decoded, and written anew.
        """
        errors: dict[int, DecodeError] = {}
        usual = dict(enumerate(values))
        columns, odd = self._walk(values)
        for index in odd:
            try:
                usual[index] = self._rewritten(values[index], schemas)
            except DecodeError as err:
                errors[index] = err
                del usual[index]
        while odd:
            records = list(usual)
            columns, odd = self._walk(list(usual.values()))
            for index in odd:
                del usual[records[index]]
                detail = f"{self._cls.__name__}: an array with too many items"
                errors[records[index]] = DecodeError(detail)
        return _skim(columns, list(usual), errors)

    def _walk(self, values: Sequence[Buffer]) -> tuple[Columns, list[int]]:
        """Columns of all records, and which of them are not as this release writes them."""
        walk = Walk(values)
        if not values:
            return Columns(self._plan, walk), []
        columns, end = self._plan.walk(walk, HEADER_BYTES)
        is_odd = (end != walk.ends) | ~_begins(walk, self._header)
        return columns, np.flatnonzero(is_odd).tolist()

    def _rewritten(self, value: Buffer, schemas: SchemaTexts) -> bytes:
        event = decode(value, schemas)
        if not isinstance(event, self._cls):
            raise DecodeError(f"a {type(event).__name__} where a {self._cls.__name__} belongs")
        try:
            return b"".join(encode(event))
        except _UNWRITABLE as err:  # another schema may hold what ours cannot, as a date
            raise DecodeError(f"{self._cls.__name__} of another schema: {err}") from err


def _begins(walk: Walk, header: bytes) -> npt.NDArray[np.bool_]:
    found = walk.byte(walk.starts[:, None] + np.arange(len(header)))
    return np.asarray((found == np.frombuffer(header, np.uint8)).all(axis=1))


def _skim(columns: Columns, records: list[int], errors: dict[int, DecodeError]) -> Skim:
    """Rounds of items joined, those of a record as neighbours."""
    found = Skim(records, errors)
    order: dict[str, Numbers] = {}
    for path, rounds in columns.owners.items():
        owners = _joined(rounds)
        order[path] = np.argsort(owners, kind="stable")
        found.owners[path] = owners[order[path]]

    def ordered(path: str, rounds: Sequence[Numbers]) -> Numbers:
        array = next((owner for owner in order if path.startswith(f"{owner}.")), None)
        column = _joined(rounds)
        return column if array is None else column[order[array]]

    for path, numbers in columns.numbers.items():
        found.numbers[path] = ordered(path, numbers)
    for path, pairs in columns.texts.items():
        begin = ordered(path, [begin for begin, _ in pairs])
        end = ordered(path, [end for _, end in pairs])
        found.texts[path] = Texts(columns.walk.joined, begin, end)
    return found


def _joined(rounds: Sequence[Numbers]) -> Numbers:
    if len(rounds) == 1:
        return rounds[0]
    return np.concatenate(rounds) if rounds else np.zeros(0, np.int64)
