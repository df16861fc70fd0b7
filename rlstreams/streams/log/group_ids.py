"""Names of groups and samples: a training group's is its issue number, an evaluation's has version
and row, a sample's is `GROUP/SAMPLE`, as is its session's.

Ids come from records that anyone may have written. A number beyond Avro's 64 bits is rejected: it
could be read, but never written into a closed set.
"""

from __future__ import annotations

import re
from typing import NamedTuple, Protocol, Self

MAX_DIGITS = 18
_NUMBER = re.compile(rf"0|[1-9][0-9]{{0,{MAX_DIGITS - 1}}}")
_SAMPLE = re.compile(r"(?P<group>\d+|e\d+-\d+)/(?P<sample>\d+)")  # as people write it
_GROUP = re.compile(r"\d+|e\d+-\d+")
_EVALUATION = re.compile(rf"e([0-9]{{1,{MAX_DIGITS}}})-([0-9]{{1,{MAX_DIGITS}}})")


def issue_number(group_id: str) -> int | None:
    """Return a training group's number; None for any other id, `07` included: one id a group."""
    return int(group_id) if _NUMBER.fullmatch(group_id) else None


def evaluation_group(version: int, row: int) -> str:
    """Return the id of the group that answers a held-out row under a version."""
    return f"e{version}-{row}"


def evaluation_id(group_id: str) -> tuple[int, int] | None:
    """Return (version, row) of `e{version}-{row}`; None for any other id."""
    found = _EVALUATION.fullmatch(group_id)
    return (int(found[1]), int(found[2])) if found else None


class OfSample(Protocol):
    """An event, or a part of one, that is about a sample."""

    @property
    def group_id(self) -> str:
        """Its group."""

    @property
    def sample(self) -> int:
        """Its number in the group."""


class SampleId(NamedTuple):
    """The identity of a sample, written `GROUP/SAMPLE`."""

    group_id: str
    sample: int

    def __str__(self) -> str:
        return sample_name(self)

    @classmethod
    def of(cls, event: OfSample) -> Self:
        """Return the identity of the sample that an event is about."""
        return cls(event.group_id, event.sample)

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse `12/3` or `e40-7/0`.

        Raises:
            ValueError: text of another form.
        """
        match = _SAMPLE.fullmatch(text)
        if match is None:
            raise ValueError(f"a sample is written GROUP/SAMPLE, as 12/3 or e40-7/0, got {text!r}")
        return cls(match["group"], int(match["sample"]))


def sample_name(of: OfSample) -> str:
    """Return a sample's name, which is also its session's id."""
    return f"{of.group_id}/{of.sample}"


def group_of(name: str) -> str:
    """Return the group of a sample's name; "": it is none. A group's own id may have a slash."""
    return name.rpartition("/")[0]


def is_group(text: str) -> bool:
    """Whether `text` can be the id of a group: `12`, or `e40-7` of an evaluation."""
    return _GROUP.fullmatch(text) is not None
