"""Tumbling windows over the small topics: what happened in each minute and in each ten. Pure.

A window is named by when it begins, in milliseconds of the events' own time, and exists once
something happened in it. The newest windows are kept, and one that never closes: the whole log.
"""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime

from rlstreams.schemas.events import (
    DeadLetter,
    Event,
    GroupsDropped,
    PolicyLoaded,
    PolicyPublished,
    StepCompleted,
    StepsRedone,
    WorkerReport,
)
from rlstreams.streams.ledger import Ledger
from rlstreams.streams.log.record import Position
from rlstreams.streams.views.run import StepPoint, step_point
from rlstreams.streams.views.workers import Restart, ThroughputView

MINUTE_S, TEN_MINUTES_S = 60, 600
KEPT: Mapping[int, int] = {MINUTE_S: 60, TEN_MINUTES_S: 144}  # windows by size: an hour, a day
Json = dict[str, object]


@dataclass(slots=True)
class Pulls:
    """Pulls of weights by one role."""

    seconds: list[float] = field(default_factory=list)  # of each, from request to checked weights
    paused_s: float = 0.0
    num_bytes: int = 0

    def figures(self) -> Json:
        """As JSON: count, p50 and longest in seconds, pause and bytes summed."""
        return {
            "count": len(self.seconds),
            "p50_s": round(statistics.median(self.seconds), 4),
            "max_s": round(max(self.seconds), 4),
            "paused_s": round(self.paused_s, 4),
            "bytes": self.num_bytes,
        }


@dataclass(slots=True)
class Window:
    """Sums of what happened in one span of time."""

    points: int = 0
    samples: int = 0
    tokens: int = 0
    masked: int = 0
    reward_sum: float = 0.0  # over samples
    step_s: float = 0.0
    staleness: Counter[int] = field(default_factory=Counter)  # trained tokens by distance
    dropped: Counter[str] = field(default_factory=Counter)  # groups by reason
    published: int = 0
    redone: int = 0
    letters: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    pulls: dict[str, Pulls] = field(default_factory=lambda: defaultdict(Pulls))
    restarts: Counter[str] = field(default_factory=Counter)  # by worker

    def step(self, point: StepPoint) -> None:
        """One step was done."""
        self.points += 1
        self.samples += point.num_samples
        self.tokens += point.num_tokens
        self.masked += point.num_masked
        self.reward_sum += point.reward * point.num_samples
        self.step_s += (point.finished_at_ms - point.started_at_ms) / 1000
        self.staleness.update(point.staleness)

    def pull(self, event: PolicyLoaded) -> None:
        """One pull ended well."""
        pulls = self.pulls[event.role]
        pulls.seconds.append(event.seconds)
        pulls.paused_s += event.paused_s
        pulls.num_bytes += event.num_bytes

    def figures(self, seconds: float) -> Json:
        """As JSON; rates are over `seconds`, means are null where nothing was."""
        return {
            "seconds": round(seconds, 3),
            "steps": self.points,
            "samples": self.samples,
            "tokens": self.tokens,
            "tokens_per_s": round(self.tokens / seconds, 1) if seconds > 0 else None,
            "reward_mean": round(self.reward_sum / self.samples, 4) if self.samples else None,
            "step_mean_s": round(self.step_s / self.points, 3) if self.points else None,
            "staleness_tokens": {str(d): self.staleness[d] for d in sorted(self.staleness)},
            "masked_segments": self.masked,
            "dropped_groups": dict(sorted(self.dropped.items())),
            "dead_letters": {role: dict(self.letters[role]) for role in sorted(self.letters)},
            "published_versions": self.published,
            "pulls": {role: self.pulls[role].figures() for role in sorted(self.pulls)},
            "restarts": dict(sorted(self.restarts.items())),
            "redone_steps": self.redone,
        }


class WindowsView:
    """Folds `steps`, `policy-versions`, `policy-pulls`, `dead-letters` and `worker-events`."""

    def __init__(self, kept: Mapping[int, int] = KEPT) -> None:
        self._kept = kept
        self._windows: dict[int, dict[int, Window]] = {size_s: {} for size_s in kept}
        self._whole = Window()
        self._ledger = Ledger(
            begins_anywhere=True, on_step=self._step, on_drop=self._drop, on_redone=self._redone
        )
        self._first_ms: int | None = None
        self._newest_ms = 0
        self._num_restarts = 0
        self.throughput = ThroughputView()

    def apply(self, event: Event) -> None:
        """Take one event; void ones of `steps` and those of other topics are passed by."""
        if isinstance(event, WorkerReport):
            self.throughput.apply(event)
            self._see(event.at_ms)
            for restart in self.throughput.restarts[self._num_restarts :]:
                self._restart(restart)
        else:
            self._ledger.apply(event)
            self._count(event)

    def _step(self, event: StepCompleted, _: Position) -> None:
        point = step_point(event)
        for window in self._at(event.finished_at_ms):
            window.step(point)

    def _drop(self, event: GroupsDropped, _: Position) -> None:
        for window in self._at(event.dropped_at_ms):
            window.dropped.update(group.reason for group in event.groups)

    def _redone(self, event: StepsRedone, _: Position) -> None:
        for window in self._at(event.at_ms):
            window.redone += event.last_step - event.first_step + 1

    def _count(self, event: Event) -> None:
        match event:
            case PolicyPublished():
                for window in self._at(event.published_at_ms):
                    window.published += 1
            case PolicyLoaded():
                for window in self._at(event.loaded_at_ms):
                    window.pull(event)
            case DeadLetter():
                for window in self._at(event.at_ms):
                    window.letters[event.role][event.reason] += 1

    def _restart(self, restart: Restart) -> None:
        self._num_restarts += 1
        for window in self._at(restart.at_ms):
            window.restarts[restart.worker] += 1

    def _see(self, at_ms: int) -> None:
        self._first_ms = at_ms if self._first_ms is None else min(self._first_ms, at_ms)
        self._newest_ms = max(self._newest_ms, at_ms)

    def _at(self, at_ms: int) -> list[Window]:
        """The whole, and of each size the window that `at_ms` lies in, unless it is gone."""
        self._see(at_ms)
        found = [self._whole]
        for size_s, windows in self._windows.items():
            start_ms = start_of(at_ms, size_s)
            if start_ms not in windows:
                if len(windows) >= self._kept[size_s] and start_ms < min(windows):
                    continue
                windows[start_ms] = Window()
                if len(windows) > self._kept[size_s]:
                    del windows[min(windows)]
            found.append(windows[start_ms])
        return found

    def rows(self, size_s: int) -> list[Json]:
        """The windows of one size, oldest first, as JSON. The newest ones still grow.

        Rates are over the part of a window that lies between the first and the newest event.
        """
        windows = self._windows[size_s]
        return [
            {"start": told_time(start_ms)}
            | windows[start_ms].figures(self._span_s(start_ms, size_s))
            for start_ms in sorted(windows)
        ]

    def whole(self) -> Json:
        """The whole log, as JSON."""
        first_ms = self._newest_ms if self._first_ms is None else self._first_ms
        return {"start": told_time(first_ms)} | self._whole.figures(
            (self._newest_ms - first_ms) / 1000
        )

    def _span_s(self, start_ms: int, size_s: int) -> float:
        first_ms = max(start_ms, self._first_ms or 0)
        return (min(start_ms + size_s * 1000, self._newest_ms) - first_ms) / 1000


def start_of(at_ms: int, size_s: int) -> int:
    """When the window of this size begins that the moment lies in; both in ms since 1970."""
    size_ms = size_s * 1000
    return at_ms // size_ms * size_ms


def told_time(at_ms: int) -> str:
    """UTC, to the second."""
    return f"{datetime.fromtimestamp(at_ms / 1000, UTC):%Y-%m-%dT%H:%M:%SZ}"
