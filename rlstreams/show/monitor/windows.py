"""Windows of one minute over the small topics: how often what happened. Pure.

A minute is named by when it begins, of the events' own time, and exists once something happened in
it. The newest ones are kept. Sums of the whole log are `rlstreams metrics` and `report`.
"""

from __future__ import annotations

from collections import Counter, defaultdict
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
_SUMS = ("steps", "samples", "tokens")
_BY_NAME = ("dropped_groups", "dead_letters", "pulls", "restarts")  # reason, reason, role, worker


class WindowsView:
    """Folds `steps`, `policy-pulls`, `dead-letters` and `worker-events`."""

    def __init__(self, kept: int = KEPT) -> None:
        self._kept = kept
        self._minutes: dict[int, defaultdict[str, Counter[str]]] = {}  # by begin, ms
        self._ledger = Ledger(begins_anywhere=True, on_step=self._step, on_drop=self._drop)
        self._num_restarts = 0
        self._throughput = ThroughputView()

    def apply(self, event: Event) -> None:
        """Take one event; void ones of `steps` and those of other topics are passed by."""
        match event:
            case WorkerReport():
                self._throughput.apply(event)
                for restart in self._throughput.restarts[self._num_restarts :]:
                    self._num_restarts += 1
                    self._at(restart.at_ms)["restarts"][restart.worker] += 1
            case PolicyLoaded():
                self._at(event.loaded_at_ms)["pulls"][event.role] += 1
            case DeadLetter():
                self._at(event.at_ms)["dead_letters"][event.reason] += 1
            case _:
                self._ledger.apply(event)

    def _step(self, event: StepCompleted, _: Position) -> None:
        point = step_point(event)
        counts = {"steps": 1, "samples": point.num_samples, "tokens": point.num_tokens}
        self._at(event.finished_at_ms)["sums"].update(counts)

    def _drop(self, event: GroupsDropped, _: Position) -> None:
        dropped = self._at(event.dropped_at_ms)["dropped_groups"]
        dropped.update(group.reason for group in event.groups)

    def _at(self, at_ms: int) -> defaultdict[str, Counter[str]]:
        """The minute that `at_ms` lies in; it is forgotten at once if older than those kept."""
        window = self._minutes.setdefault(start_of(at_ms), defaultdict(Counter))
        if len(self._minutes) > self._kept:
            del self._minutes[min(self._minutes)]
        return window

    def rows(self) -> list[Json]:
        """The minutes, oldest first, as JSON. The newest one still grows."""
        return [
            {
                "start": f"{datetime.fromtimestamp(start_ms / 1000, UTC):%Y-%m-%dT%H:%M:%SZ}",
                **{name: window["sums"][name] for name in _SUMS},
                **{name: dict(sorted(window[name].items())) for name in _BY_NAME},
            }
            for start_ms, window in sorted(self._minutes.items())
        ]


def start_of(at_ms: int) -> int:
    """When the minute begins that the moment lies in; both in ms since 1970."""
    return at_ms // MINUTE_MS * MINUTE_MS
