"""Windows of one minute over the small topics. Pure.

A minute is named by when it begins, of the events' own time, and exists once something happened in
it. The newest ones are kept. Sums of the whole log are `rlstreams metrics` and `report`.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from datetime import UTC, datetime

from rlstreams.schemas.events import (
    DeadLetter,
    Event,
    GroupsDropped,
    PolicyLoaded,
    StepCompleted,
    WorkerReport,
)
from rlstreams.streams.ledger import Ledger
from rlstreams.streams.log.record import Position
from rlstreams.streams.views.run import step_point
from rlstreams.streams.views.workers import ThroughputView

MINUTE_MS = 60_000
KEPT = 120  # minutes
Json = dict[str, object]


@dataclass(slots=True)
class Window:
    """Sums of what happened in one minute."""

    sums: Counter[str] = field(default_factory=Counter)
    reward_sum: float = 0.0  # over samples
    step_s: float = 0.0
    staleness: Counter[int] = field(default_factory=Counter)  # trained tokens by distance
    dropped: Counter[str] = field(default_factory=Counter)  # groups by reason
    letters: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    pulls_s: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))  # by role
    restarts: Counter[str] = field(default_factory=Counter)  # by worker

    def figures(self, start_ms: int, seconds: float) -> Json:
        """As JSON; rates are over `seconds`, means are null where nothing was."""
        sums, steps, samples = self.sums, self.sums["steps"], self.sums["samples"]
        return {
            "start": f"{datetime.fromtimestamp(start_ms / 1000, UTC):%Y-%m-%dT%H:%M:%SZ}",
            "seconds": round(seconds, 3),
            **{name: sums[name] for name in ("steps", "samples", "tokens", "masked_segments")},
            "tokens_per_s": round(sums["tokens"] / seconds, 1) if seconds > 0 else None,
            "reward_mean": round(self.reward_sum / samples, 4) if samples else None,
            "step_mean_s": round(self.step_s / steps, 3) if steps else None,
            "staleness_tokens": {str(d): self.staleness[d] for d in sorted(self.staleness)},
            "dropped_groups": dict(sorted(self.dropped.items())),
            "dead_letters": {role: dict(self.letters[role]) for role in sorted(self.letters)},
            "pulls": {
                role: {"count": len(pulls), "max_s": round(max(pulls), 4)}
                for role, pulls in sorted(self.pulls_s.items())
            },
            "restarts": dict(sorted(self.restarts.items())),
        }


class WindowsView:
    """Folds `steps`, `policy-pulls`, `dead-letters` and `worker-events`."""

    def __init__(self, kept: int = KEPT) -> None:
        self._kept = kept
        self._minutes: dict[int, Window] = {}  # by begin, ms
        self._ledger = Ledger(begins_anywhere=True, on_step=self._step, on_drop=self._drop)
        self._first_ms = self._newest_ms = 0
        self._num_restarts = 0
        self._throughput = ThroughputView()

    def apply(self, event: Event) -> None:
        """Take one event; void ones of `steps` and those of other topics are passed by."""
        match event:
            case WorkerReport():
                self._throughput.apply(event)
                self._see(event.at_ms)
                for restart in self._throughput.restarts[self._num_restarts :]:
                    self._num_restarts += 1
                    self._at(restart.at_ms).restarts[restart.worker] += 1
            case PolicyLoaded():
                self._at(event.loaded_at_ms).pulls_s[event.role].append(event.seconds)
            case DeadLetter():
                self._at(event.at_ms).letters[event.role][event.reason] += 1
            case _:
                self._ledger.apply(event)

    def _step(self, event: StepCompleted, _: Position) -> None:
        point, window = step_point(event), self._at(event.finished_at_ms)
        window.sums["steps"] += 1
        window.sums["samples"] += point.num_samples
        window.sums["tokens"] += point.num_tokens
        window.sums["masked_segments"] += point.num_masked
        window.reward_sum += point.reward * point.num_samples
        window.step_s += (point.finished_at_ms - point.started_at_ms) / 1000
        window.staleness.update(point.staleness)

    def _drop(self, event: GroupsDropped, _: Position) -> None:
        dropped = self._at(event.dropped_at_ms).dropped
        dropped.update(group.reason for group in event.groups)

    def _see(self, at_ms: int) -> None:
        self._first_ms = min(self._first_ms or at_ms, at_ms)
        self._newest_ms = max(self._newest_ms, at_ms)

    def _at(self, at_ms: int) -> Window:
        """The minute that `at_ms` lies in; it is forgotten at once if older than those kept."""
        self._see(at_ms)
        start_ms = start_of(at_ms)
        window = self._minutes.setdefault(start_ms, Window())
        if len(self._minutes) > self._kept:
            del self._minutes[min(self._minutes)]
        return window

    def rows(self) -> list[Json]:
        """The minutes, oldest first, as JSON. The newest one still grows.

        Rates are over the part of a minute that lies between the first and the newest event.
        """
        return [
            window.figures(start_ms, self._span_s(start_ms, start_ms + MINUTE_MS))
            for start_ms, window in sorted(self._minutes.items())
        ]

    def _span_s(self, start_ms: int, end_ms: int) -> float:
        return (min(end_ms, self._newest_ms) - max(start_ms, self._first_ms)) / 1000


def start_of(at_ms: int) -> int:
    """When the minute begins that the moment lies in; both in ms since 1970."""
    return at_ms // MINUTE_MS * MINUTE_MS
