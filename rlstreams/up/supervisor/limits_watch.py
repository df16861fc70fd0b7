"""Warns of a disk filling up and of records that retention is about to delete."""

from __future__ import annotations

import shutil
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from rlstreams.schemas.events import Event
from rlstreams.streams.log.bus import Bus
from rlstreams.streams.log.codec import now_ms
from rlstreams.streams.log.record import LogRange, Partition
from rlstreams.streams.log.topics import DEAD_LETTERS, SCORED
from rlstreams.streams.views.redo_needs import NeedsView, Retention, retention_problems
from rlstreams.up.supervisor.background_call import BackgroundCall

LOOK_S = 5.0  # between two looks at the disk
ASK_S = 60.0  # between two questions about retention
TELL_S = 600.0  # the same warning is not repeated before
LOW_BYTES = 1_000_000_000
SOON_S = 3600.0
_WINDOW = 60  # looks: five minutes
_MIN_SPAN_S = 30.0  # shorter ones say nothing about growth


class DiskTrend:
    """Free bytes over time, and when they run out. Pure."""

    def __init__(self) -> None:
        self._looks: deque[tuple[float, int]] = deque(maxlen=_WINDOW)

    def look(self, now_s: float, free_bytes: int) -> str:
        """What to warn of, or ""."""
        self._looks.append((now_s, free_bytes))
        since_s, before = self._looks[0]
        span_s = now_s - since_s
        found = f"{free_bytes / 1e9:.2f} GB are free on the broker's disk"
        if span_s >= _MIN_SPAN_S and before > free_bytes:
            per_s = (before - free_bytes) / span_s
            left_s = free_bytes / per_s
            if left_s < SOON_S:
                return f"{found}, full in {left_s / 60:.0f} min at {per_s / 1e6:.1f} MB/s"
        return f"{found}: a full disk stops the broker" if free_bytes < LOW_BYTES else ""


@dataclass(frozen=True, slots=True)
class Holdings:
    """What the broker holds of the topics that a restart reads, and for how long."""

    kept: Mapping[Partition, LogRange]
    retention: Mapping[str, Retention]


def ask_holdings(bus: Bus) -> Holdings:
    """Ask the broker."""
    topics = (SCORED.name, DEAD_LETTERS.name)
    kept: dict[Partition, LogRange] = {}
    for topic in topics:
        ends = bus.ends(topic)
        kept |= {p: LogRange(begin=at, end=ends[p]) for p, at in bus.beginnings(topic).items()}
    return Holdings(kept, {topic: Retention.of(bus.settings(topic)) for topic in topics})


class LimitsWatch:
    """Fed with events, ticked from the loop of `up`; never waits.

    Args:
        folder: the embedded broker's; None: its disk is somebody else's, see `rlstreams doctor`.
        ask: what the broker holds; called in a thread.
    """

    def __init__(
        self, checkpoint_every: int, folder: Path | None, ask: Callable[[], Holdings]
    ) -> None:
        self._folder = folder
        self._ask = ask
        self._needs = NeedsView(checkpoint_every)
        self._trend = DiskTrend()
        self._call: BackgroundCall[Holdings] | None = None
        self._next_look_s = 0.0
        self._next_ask_s = time.monotonic() + ASK_S
        self._quiet_until_s: dict[str, float] = {}  # by kind of warning

    def apply(self, event: Event) -> None:
        """Take one event."""
        self._needs.apply(event)

    def tick(self) -> str:
        """A new warning, or ""."""
        now_s = time.monotonic()
        return self._disk(now_s) or self._retention(now_s)

    def _disk(self, now_s: float) -> str:
        if self._folder is None or now_s < self._next_look_s:
            return ""
        self._next_look_s = now_s + LOOK_S
        if not self._folder.is_dir():
            return ""
        free_bytes = shutil.disk_usage(self._folder).free
        return self._once("disk", self._trend.look(now_s, free_bytes), now_s)

    def _retention(self, now_s: float) -> str:
        if self._call is None:
            if now_s >= self._next_ask_s:
                self._call = BackgroundCall(self._ask, ASK_S)
            return ""
        if not self._call.is_over():
            return ""
        holds, self._call = self._call.answer, None
        self._next_ask_s = now_s + ASK_S
        if holds is None:
            return ""
        found = retention_problems(self._needs.needs, holds.kept, holds.retention, now_ms())
        return self._once("retention", "; ".join(problem.text for problem in found), now_s)

    def _once(self, kind: str, text: str, now_s: float) -> str:
        if not text or now_s < self._quiet_until_s.get(kind, 0.0):
            return ""
        self._quiet_until_s[kind] = now_s + TELL_S
        return f"warning: {text}"
