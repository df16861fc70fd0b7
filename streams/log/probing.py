"""The note after a done set: how often a record was started by workers that did not survive it.

Text of the form `probing OFFSET, TRIES`. It is committed before the record is started, so it is
still there after the record has killed its worker. How it is used: `workers.loop.probation`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Self

_FORM = re.compile(r"probing (\d+),? (\d+)")


@dataclass(frozen=True, slots=True)
class Probing:
    """A record, and the number of workers that began it at the low watermark."""

    offset: int  # of its first part
    tries: int

    def __str__(self) -> str:
        return f"probing {self.offset}, {self.tries}"

    @classmethod
    def parse(cls, note: str) -> Self | None:
        """The note as it was written; None for an empty one, or another's."""
        found = _FORM.fullmatch(note)
        return cls(int(found[1]), int(found[2])) if found else None
