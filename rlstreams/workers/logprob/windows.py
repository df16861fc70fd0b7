"""Windows: trajectories that are scored together, in order.

The trajectories of a window decide how bins are filled, or rows padded, and so the last bit of a
log-prob (measured: alone instead of among 63 others, 62 of 64 sequences differ, by up to 1.5e-5). A
worker takes what has arrived, and records its window in each `ScoredTrajectory`, from which a
replay scores it again. How a window is cut follows from its order alone (`workers.model.cut`).
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from typing import NamedTuple

from rlstreams.schemas.events import Trajectory
from rlstreams.streams.log.record import Partition, Position, Record
from rlstreams.streams.tokens import num_tokens
from rlstreams.workers.logprob.versions import versions_of

ANNOUNCEMENT_DEADLINE_S = 30.0  # for a version that is on its way
FULL = 4  # forward passes of a whole window: among so many, the last one's empty rest is small
POLL = 256  # records taken at once


class Waiting(NamedTuple):
    """A trajectory that waits to be scored."""

    record: Record[Trajectory]
    versions: frozenset[int]  # that sampled it
    num_tokens: int

    @classmethod
    def of(cls, record: Record[Trajectory]) -> Waiting:
        """Compute once what every iteration asks for."""
        event = record.event
        return cls(record, versions_of(event), num_tokens(event))


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
        return 0 if self._num_tokens > 2 * FULL * self._token_budget else POLL

    def add(self, record: Record[Trajectory]) -> None:
        """Add a trajectory behind all others."""
        if not self._all:
            self._since = time.monotonic()
        self._all.append(Waiting.of(record))

    def forget(self, partitions: Collection[Partition]) -> int:
        """Remove the trajectories of these partitions; return their number."""
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

    def ready(self) -> list[Waiting]:
        """Trajectories that may be scored next: all whose versions are announced."""
        return [o for o in self._all if o.record.position not in self._unannounced]

    def is_due(self, num_under_way: int) -> bool:
        """Whether a window is to start now, behind `num_under_way` others.

        One that is whole is queued behind another, so that a scorer that is behind never waits.
        """
        if not self._all or num_under_way > 1:
            return False
        if num_under_way:
            return self._num_tokens >= FULL * self._token_budget
        is_whole = self._num_tokens >= self._token_budget
        return is_whole or time.monotonic() - self._since >= self._window_s

    def take(self, ready: Sequence[Waiting]) -> list[Record[Trajectory]]:
        """Remove these, or the first of them that make a whole window."""
        window, tokens = [], 0
        for one in ready:
            if tokens >= FULL * self._token_budget:
                break
            window.append(one)
            tokens += one.num_tokens
        self._remove(window)
        self._since = time.monotonic()
        return [one.record for one in window]

    @property
    def _num_tokens(self) -> int:
        return sum(one.num_tokens for one in self._all)

    def _remove(self, gone: Sequence[Waiting]) -> None:
        positions = {one.record.position for one in gone}
        self._all = [one for one in self._all if one.record.position not in positions]
