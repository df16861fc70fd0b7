"""Rules by which an ended process is started again, or given up. Pure.

Its deaths in a row are counted. A row ends with *headway*: the process did its work, whatever ended
it afterwards, or it stood for `steady_s`. So a process that works for a while and fails is started
again for ever, and one that never works is given up:

    how it ended    headway    counts            is started again
    EXCUSED         either     as nothing        at once: it was meant to end
    FAILED          yes        as nothing        at once
                    no         death, failure    after a pause; never, at `failures` in a row
    KILLED          yes        as nothing        at once
                    no         death             after a pause: somebody else's doing
    NO_ROOM         either     death             after a pause; never, once it waited for `room_s`

    limit 3:  F F headway F F F -> given up        headway ends a row, an excuse does not:
    limit 3:  F excused F F     -> given up        F is a start that fails, or an end by itself

A pause doubles with every death of the row, from `first_s` to `longest_s`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

FIRST_S = 0.5  # the pause after the first death; a start takes longer than that
LONGEST_S = 15.0  # the longest pause: a cure from outside is noticed within this
_MOST_DOUBLED = 16  # beyond it 2 ** n only overflows


class Ended(StrEnum):
    """Kinds of end of a process, or of a start of it."""

    EXCUSED = "excused"
    FAILED = "failed"
    KILLED = "killed"
    NO_ROOM = "no room"  # its disk is full


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Failures and times that a process is granted."""

    failures: float = math.inf  # failures in a row; with the last one it is given up
    first_s: float = FIRST_S
    longest_s: float = LONGEST_S
    steady_s: float = math.inf  # a life of this length is headway
    room_s: float = 0.0  # longest wait for room on a full disk; 0: for ever


class RestartVerdict(NamedTuple):
    """The decision on an end."""

    is_over: bool  # the process is given up
    delay_s: float  # until its next start
    failures: int  # in this row
    row_s: float  # since the first death of this row
    room_s: float  # since it has been waiting for room on its disk


class Keeper:
    """The memory of one process and its successors: deaths in a row, failures, waits for room."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._deaths = self._failures = 0
        self._since_s: float | None = None  # when the row began
        self._full_since_s: float | None = None

    def ended(
        self, how: Ended, now_s: float, *, has_headway: bool = False, lived_s: float = 0.0
    ) -> RestartVerdict:
        """Take an end; return the decision on it.

        Args:
            now_s: time of a clock that never goes back.
            has_headway: it has done its work since its start.
            lived_s: time since its start; 0: the start itself failed.
        """
        if has_headway or lived_s >= self._limits.steady_s:
            self._deaths = self._failures = 0
            self._since_s = self._full_since_s = None
            has_headway = True
        if how is Ended.EXCUSED or (has_headway and how is not Ended.NO_ROOM):
            return self._verdict(now_s, delay_s=0.0)
        self._deaths += 1
        self._since_s = now_s if self._since_s is None else self._since_s
        if how is Ended.NO_ROOM:
            self._full_since_s = now_s if self._full_since_s is None else self._full_since_s
        else:
            self._full_since_s = None
        self._failures += how is Ended.FAILED
        doubled = 2.0 ** min(self._deaths - 1, _MOST_DOUBLED)
        return self._verdict(
            now_s, delay_s=min(self._limits.longest_s, self._limits.first_s * doubled), how=how
        )

    def has_room(self) -> None:
        """Note that a start had room: a full disk from now on is another wait."""
        self._full_since_s = None

    @property
    def lacks_room(self) -> bool:
        """Whether it waits for room on its disk."""
        return self._full_since_s is not None

    def _verdict(
        self, now_s: float, *, delay_s: float, how: Ended = Ended.EXCUSED
    ) -> RestartVerdict:
        row_s, room_s = (
            0.0 if since is None else now_s - since for since in (self._since_s, self._full_since_s)
        )
        is_over = how is Ended.FAILED and self._failures >= self._limits.failures
        is_over |= how is Ended.NO_ROOM and 0 < self._limits.room_s <= room_s
        return RestartVerdict(is_over, delay_s, self._failures, row_s, room_s)
