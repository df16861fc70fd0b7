"""The progress bar of a replay, on standard error where that is a terminal."""

from __future__ import annotations

import math
import sys
import time
from types import TracebackType
from typing import Any, Self

from rlstreams.debug.replay.player import Pace, Played
from rlstreams.streams.recording import Recording
from rlstreams.up.live.visible import visible

EVERY_S = 0.1
_NOTHING = Played(num_records=0, num_bytes=0, at_ms=0, seconds=0.0, by_topic={})


class Bar:
    """How far a replay is in recorded time, and how fast."""

    def __init__(self, recording: Recording, pace: Pace) -> None:
        span = recording.time_span or (0, 0)
        self._first_ms, self._last_ms = span
        self._pace = pace
        self._played: Played | None = None
        self._next_s = 0.0
        self._progress: Any = None
        self._task: Any = None

    def __enter__(self) -> Self:
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn

            self._progress = Progress(
                TextColumn("{task.description}", markup=False),
                BarColumn(),
                TextColumn("{task.percentage:>3.0f} %"),
                console=Console(stderr=True),
            )
            total = max(1, self._last_ms - self._first_ms)
            self._task = self._progress.add_task("", total=total)
            self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._progress is not None:
            self.show(force=True)
            self._progress.stop()

    def show(self, played: Played | None = None, *, said: str = "", force: bool = False) -> None:
        """Draw it, at most ten times a second, with what is `said` behind it."""
        self._played = played or self._played
        if self._progress is None or (time.monotonic() < self._next_s and not force):
            return
        self._next_s = time.monotonic() + EVERY_S
        done = self._played or _NOTHING
        ahead_ms = max(0, done.at_ms - self._first_ms)
        self._progress.update(
            self._task,
            completed=ahead_ms,
            description=f"{done.num_records:>9,} records  "
            f"+{ahead_ms / 1000:.1f} s  {self._speed()}" + (f"  {visible(said)}" if said else ""),
        )

    def _speed(self) -> str:
        if self._pace.is_paused:
            return "paused"
        return "max" if math.isinf(self._pace.speed) else f"x{self._pace.speed:g}"
