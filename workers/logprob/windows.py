"""Windows: which trajectories are scored together, and in which order.

What is scored together decides how bins are filled, or rows padded, and with them the last bit of a
log-prob (measured: alone instead of among 63 others, 62 of 64 sequences differ, by up to 1.5e-5). A
live worker takes what has arrived, and records its window in each `ScoredTrajectory`. A replay
passes it on in the header `rlstreams-window` = `{name}/{place}/{size}`, and such records are scored
in exactly that window. How a window is cut follows from its order alone (`workers.model.cut`).
"""

from __future__ import annotations

import re
import time
from collections.abc import Collection, Sequence
from typing import NamedTuple

from rlstreams.schemas.events import Trajectory
from rlstreams.streams.log.record import WINDOW_HEADER, Partition, Position, RawRecord, Record
from rlstreams.workers.logprob.scoring import num_tokens
from rlstreams.workers.logprob.versions import versions_of

ANNOUNCEMENT_DEADLINE_S = 30.0  # for what is on its way: a version, the rest of a window
FULL = 4  # forward passes of a whole window: of so many bins the last one's rest is little
POLL = 256  # records taken at once

_HEADER = re.compile(r"([^/]+)/([0-9]{1,9})/([0-9]{1,9})")


class Prescribed(NamedTuple):
    """What the header says."""

    name: str
    place: int
    size: int


def header_of(name: str, place: int, size: int) -> dict[str, bytes]:
    """The header that prescribes a window."""
    return {WINDOW_HEADER: f"{name}/{place}/{size}".encode()}


def prescribed(raw: RawRecord) -> Prescribed | None:
    """The window that a record was sent for; None if it was sent for none."""
    found = _HEADER.fullmatch(raw.headers.get(WINDOW_HEADER, b"").decode("ascii", "replace"))
    if found is None or int(found[2]) >= int(found[3]):
        return None
    return Prescribed(found[1], int(found[2]), int(found[3]))


class Waiting(NamedTuple):
    """A trajectory that waits to be scored."""

    record: Record[Trajectory]
    versions: frozenset[int]  # that sampled it
    num_tokens: int
    prescribed: Prescribed | None  # its window

    @classmethod
    def of(cls, record: Record[Trajectory]) -> Waiting:
        """What is asked in every turn is found out once."""
        event = record.event
        return cls(record, versions_of(event), num_tokens(event), prescribed(record.raw))


def next_window(waiting: Sequence[Waiting]) -> list[Waiting] | None:
    """The window of the first that was sent for one, in its order; None while it is not whole."""
    named = [(found, one) for one in waiting if (found := one.prescribed) is not None]
    if not named:
        return None
    name, size = named[0][0].name, named[0][0].size
    window = {found.place: one for found, one in named if found.name == name}
    return [window[place] for place in range(size)] if len(window) == size else None


class Backlog:
    """Trajectories that wait to be scored, in the order of their arrival.

    Args:
        token_budget: tokens of a forward pass; a window of so many does not wait.
        window_s: longest wait for it while nothing is being scored.
    """

    def __init__(self, token_budget: int, window_s: float) -> None:
        self._token_budget = token_budget
        self._window_s = window_s
        self._all: list[Waiting] = []
        self._since = 0.0  # of the first, or of the last window
        self._unannounced: dict[Position, float] = {}  # since when one waits for its version

    def __len__(self) -> int:
        return len(self._all)

    @property
    def room(self) -> int:
        """Records that it would take: room for two whole windows."""
        is_whole = self._num_tokens > 2 * FULL * self._token_budget
        return 0 if is_whole and not self._awaits_rest() else POLL

    def add(self, record: Record[Trajectory]) -> None:
        """Behind all others."""
        if not self._all:
            self._since = time.monotonic()
        self._all.append(Waiting.of(record))

    def forget(self, partitions: Collection[Partition]) -> int:
        """Remove those of these partitions; how many."""
        before = len(self._all)
        self._all = [one for one in self._all if one.record.raw.partition not in partitions]
        return before - len(self._all)

    def overdue(self, newest: int) -> list[Waiting]:
        """Remove those whose version is above `newest` and was not announced in time.

        A sampler may know a version a moment before we do. One that never comes is poison: its
        record waits alone, up to a deadline, and holds nobody up.
        """
        now = time.monotonic()
        waiting = [one for one in self._all if max(one.versions) > newest]
        since = self._unannounced
        self._unannounced = {(at := o.record.position): since.get(at, now) for o in waiting}
        last = now - ANNOUNCEMENT_DEADLINE_S
        late = [one for one in waiting if self._unannounced[one.record.position] <= last]
        self._remove(late)
        return late

    def ready(self) -> tuple[list[Waiting], bool]:
        """What may be scored next: a prescribed window, else all whose versions are announced; and
        which of the two it is."""
        announced = [o for o in self._all if o.record.position not in self._unannounced]
        window = next_window(announced)
        return window or announced, window is not None

    def is_due(self, num_under_way: int) -> bool:
        """Whether a window is to start now, behind `num_under_way` others.

        One that is whole is queued behind another, so that a scorer that is behind never waits.
        """
        if not self._all or self._awaits_rest() or num_under_way > 1:
            return False
        if num_under_way:
            return self._num_tokens >= FULL * self._token_budget
        is_whole = self._num_tokens >= self._token_budget or next_window(self._all) is not None
        return is_whole or self._waited_s() >= self._window_s

    def take(self, ready: Sequence[Waiting]) -> list[Record[Trajectory]]:
        """Remove these, or the first of them that make a whole window; prescribed ones are one."""
        window, tokens = [], 0
        for one in ready:
            if tokens >= FULL * self._token_budget and one.prescribed is None:
                break
            window.append(one)
            tokens += one.num_tokens
        self._remove(window)
        self._since = time.monotonic()
        return [one.record for one in window]

    def _awaits_rest(self) -> bool:
        """Whether the first one's window is to be completed yet.

        One that does not get whole is a stranger's, or lacks a record that was set aside.
        """
        if not self._all or self._all[0].prescribed is None:
            return False
        is_whole = next_window(self._all) is not None
        return not is_whole and self._waited_s() < ANNOUNCEMENT_DEADLINE_S

    @property
    def _num_tokens(self) -> int:
        return sum(one.num_tokens for one in self._all)

    def _waited_s(self) -> float:
        return time.monotonic() - self._since

    def _remove(self, gone: Sequence[Waiting]) -> None:
        positions = {one.record.position for one in gone}
        self._all = [one for one in self._all if one.record.position not in positions]
