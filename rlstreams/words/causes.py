"""Dead letters by cause: one line for all that failed at the same place with the same error."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from rlstreams.schemas.events import DeadLetter

_RAISED = re.compile(r"(\S+:\d+): .*?\braised (\w+)", re.S)  # of user code
_VARIES = re.compile(r"'[^']*'|\"[^\"]*\"|0x[0-9a-f]+|\d+")
_LONGEST = 200  # characters of a detail without a place that distinguish causes


@dataclass(slots=True)
class Cause:
    """Dead letters of one cause: their reason, number and newest detail."""

    reason: str
    num: int
    newest: str  # detail of the newest dead letter, on one line


def causes(letters: Iterable[DeadLetter]) -> list[Cause]:
    """Return dead letters by cause, the most frequent cause first.

    Args:
        letters: dead letters, the oldest first.
    """
    found: dict[tuple[str, str], Cause] = {}
    for letter in letters:
        detail = " ".join(letter.detail.split())
        one = found.setdefault((letter.reason, _same(detail)), Cause(letter.reason, 0, ""))
        one.num, one.newest = one.num + 1, detail
    return sorted(found.values(), key=lambda cause: -cause.num)


def _same(detail: str) -> str:
    """Return `file:line` and the error's name; else the detail without quoted words and numbers."""
    if (raised := _RAISED.match(detail)) is not None:
        return f"{raised[1]} {raised[2]}"
    return _VARIES.sub("#", detail[:_LONGEST])
