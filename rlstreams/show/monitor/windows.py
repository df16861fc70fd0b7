"""Windows of one minute over the small topics, and one of the whole log. Pure.

A minute is named by when it begins, of the events' own time, and exists once something happened in
it. The newest ones are kept.
"""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict, deque
from dataclasses import asdict, dataclass, field
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
from rlstreams.streams.views.pace import STEPS, bottleneck, pace, shortage
from rlstreams.streams.views.run import StepPoint, step_point
from rlstreams.streams.views.workers import ThroughputView

MINUTE_MS = 60_000
KEPT = 120  # minutes
Json = dict[str, object]


@dataclass(slots=True)
class Window:
    """Sums of what happened in one span of time."""

    sums: Counter[str] = field(default_factory=Counter)
    reward_sum: float = 0.0  # over samples
    step_s: float = 0.0
    staleness: Counter[int] = field(default_factory=Counter)  # trained tokens by distance
    dropped: Counter[str] = field(default_factory=Counter)  # groups by reason
    letters: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    pulls: dict[str, list[PolicyLoaded]] = field(default_factory=lambda: defaultdict(list))
    restarts: Counter[str] = field(default_factory=Counter)  # by worker

    def step(self, point: StepPoint) -> None:
        """One step was done."""
        self.sums["steps"] += 1
        self.sums["samples"] += point.num_samples
        self.sums["tokens"] += point.num_tokens
        self.sums["masked_segments"] += point.num_masked
        self.reward_sum += point.reward * point.num_samples
        self.step_s += (point.finished_at_ms - point.started_at_ms) / 1000
        self.staleness.update(point.staleness)

    def figures(self, start_ms: int, seconds: float) -> Json:
        """As JSON; rates are over `seconds`, means are null where nothing was."""
        sums, steps, samples = self.sums, self.sums["steps"], self.sums["samples"]
        names = ("steps", "samples", "tokens", "masked_segments", "published_versions")
        return {
            "start": told_time(start_ms),
            "seconds": round(seconds, 3),
            **{name: sums[name] for name in (*names, "redone_steps")},
            "tokens_per_s": round(sums["tokens"] / seconds, 1) if seconds > 0 else None,
            "reward_mean": round(self.reward_sum / samples, 4) if samples else None,
            "step_mean_s": round(self.step_s / steps, 3) if steps else None,
            "staleness_tokens": {str(d): self.staleness[d] for d in sorted(self.staleness)},
            "dropped_groups": dict(sorted(self.dropped.items())),
            "dead_letters": {role: dict(self.letters[role]) for role in sorted(self.letters)},
            "pulls": {role: _pulled(self.pulls[role]) for role in sorted(self.pulls)},
            "restarts": dict(sorted(self.restarts.items())),
        }


def _pulled(pulls: list[PolicyLoaded]) -> Json:
    seconds = [pull.seconds for pull in pulls]  # from request to checked weights
    return {
        "count": len(pulls),
        "p50_s": round(statistics.median(seconds), 4),
        "max_s": round(max(seconds), 4),
        "paused_s": round(sum(pull.paused_s for pull in pulls), 4),
        "bytes": sum(pull.num_bytes for pull in pulls),
    }


class WindowsView:
    """Folds `steps`, `policy-versions`, `policy-pulls`, `dead-letters` and `worker-events`."""

    def __init__(self, kept: int = KEPT) -> None:
        self._kept = kept
        self._minutes: dict[int, Window] = {}  # by begin, ms
        self._whole = Window()
        self._ledger = Ledger(
            begins_anywhere=True, on_step=self._step, on_drop=self._drop, on_redone=self._redone
        )
        self._first_ms = self._newest_ms = 0
        self._num_restarts = 0
        self.throughput = ThroughputView()
        self._steps: deque[StepPoint] = deque(maxlen=STEPS + 1)

    def apply(self, event: Event) -> None:
        """Take one event; void ones of `steps` and those of other topics are passed by."""
        if isinstance(event, WorkerReport):
            self.throughput.apply(event)
            self._see(event.at_ms)
            for restart in self.throughput.restarts[self._num_restarts :]:
                self._num_restarts += 1
                for window in self._at(restart.at_ms):
                    window.restarts[restart.worker] += 1
        else:
            self._ledger.apply(event)
            self._count(event)

    def _step(self, event: StepCompleted, _: Position) -> None:
        self._steps.append(step_point(event))
        for window in self._at(event.finished_at_ms):
            window.step(self._steps[-1])

    def _drop(self, event: GroupsDropped, _: Position) -> None:
        for window in self._at(event.dropped_at_ms):
            window.dropped.update(group.reason for group in event.groups)

    def _redone(self, event: StepsRedone, _: Position) -> None:
        for window in self._at(event.at_ms):
            window.sums["redone_steps"] += event.last_step - event.first_step + 1

    def _count(self, event: Event) -> None:
        match event:
            case PolicyPublished():
                for window in self._at(event.published_at_ms):
                    window.sums["published_versions"] += 1
            case PolicyLoaded():
                for window in self._at(event.loaded_at_ms):
                    window.pulls[event.role].append(event)
            case DeadLetter():
                for window in self._at(event.at_ms):
                    window.letters[event.role][event.reason] += 1

    def _see(self, at_ms: int) -> None:
        self._first_ms = min(self._first_ms or at_ms, at_ms)
        self._newest_ms = max(self._newest_ms, at_ms)

    def _at(self, at_ms: int) -> list[Window]:
        """The whole, and the minute that `at_ms` lies in, unless it is gone."""
        self._see(at_ms)
        start_ms = start_of(at_ms)
        if start_ms not in self._minutes:
            if len(self._minutes) >= self._kept and start_ms < min(self._minutes):
                return [self._whole]
            self._minutes[start_ms] = Window()
            if len(self._minutes) > self._kept:
                del self._minutes[min(self._minutes)]
        return [self._whole, self._minutes[start_ms]]

    def rows(self) -> list[Json]:
        """The minutes, oldest first, as JSON. The newest one still grows.

        Rates are over the part of a minute that lies between the first and the newest event.
        """
        return [
            window.figures(start_ms, self._span_s(start_ms, start_ms + MINUTE_MS))
            for start_ms, window in sorted(self._minutes.items())
        ]

    def pace(self) -> Json:
        """Means over the last steps, and who holds whom back."""
        steps = list(self._steps)
        found = pace(steps)
        means = {} if found is None else asdict(found)
        return {
            **{name: round(value, 4) for name, value in means.items()},
            "bottleneck": bottleneck(steps),
            "shortage": shortage(steps),
        }

    def whole(self) -> Json:
        """The whole log, as JSON."""
        return self._whole.figures(self._first_ms, self._span_s(self._first_ms, self._newest_ms))

    def _span_s(self, start_ms: int, end_ms: int) -> float:
        return (min(end_ms, self._newest_ms) - max(start_ms, self._first_ms)) / 1000


def start_of(at_ms: int) -> int:
    """When the minute begins that the moment lies in; both in ms since 1970."""
    return at_ms // MINUTE_MS * MINUTE_MS


def told_time(at_ms: int) -> str:
    """UTC, to the second."""
    return f"{datetime.fromtimestamp(at_ms / 1000, UTC):%Y-%m-%dT%H:%M:%SZ}"
