"""Answers of the monitor: records in, JSON out. Pure but for the clocks of its health.

A minute of `/windows` is named by when it begins, of the events' own time, and exists once
something happened in it. The newest ones are kept. Sums of the whole log are those of `metrics`.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime

from rlstreams.schemas import DecodeError, SchemaTexts
from rlstreams.schemas.binary import NO_TEXTS
from rlstreams.schemas.events import (
    DeadLetter,
    Event,
    GroupsDropped,
    PolicyLoaded,
    StepCompleted,
    WorkerReport,
)
from rlstreams.show.monitor.health import HealthWatch
from rlstreams.streams.ledger import Ledger
from rlstreams.streams.log.codec import decoded
from rlstreams.streams.log.errors import StreamsError
from rlstreams.streams.log.parts import Assembler, Message
from rlstreams.streams.log.record import Partition, Position
from rlstreams.streams.log.topics import (
    CONTROL,
    DEAD_LETTERS,
    POLICY_PULLS,
    POLICY_VERSIONS,
    STEPS,
    WORKER_EVENTS,
    Topic,
)
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


# Never those with payloads: prompts, trajectories, scored-trajectories.
SMALL: Sequence[Topic] = (
    STEPS,
    POLICY_VERSIONS,
    POLICY_PULLS,
    DEAD_LETTERS,
    WORKER_EVENTS,
    CONTROL,
)
OK, UNWELL = 200, 503
Answer = tuple[int, Json]  # status and body


class Monitor:
    """Folds the small topics of one run; belongs to one thread.

    Args:
        schemas: of the run's bus, for records of other releases.
    """

    def __init__(self, run: str, health: HealthWatch, schemas: SchemaTexts = NO_TEXTS) -> None:
        self._run = run
        self._schemas = schemas
        self._health = health
        self._windows = WindowsView()
        self._assembler = Assembler()
        self._next: dict[Partition, int] = {}
        self._num_records = 0
        self._num_unreadable = 0

    def take(self, message: Message) -> None:
        """A record, or a part of one. What cannot be read is counted; its role dead-letters it.

        What was taken before is passed by: with no committed offsets a client that had to join its
        group again begins anew.
        """
        if message.offset < self._next.get(message.partition, 0):
            return
        self._next[message.partition] = message.offset + 1
        raw = self._assembler.add(message)
        if raw is None:
            return
        try:
            event = decoded(raw, self._schemas).event
        except (DecodeError, StreamsError):  # the latter: nobody to ask for its schema
            self._num_unreadable += 1
            return
        self._num_records += 1
        self._windows.apply(event)
        self._health.apply(event)

    def tick(self, num_behind: int) -> None:
        """As of `HealthWatch`."""
        self._health.tick(num_behind)

    def windows(self) -> Answer:
        """`/windows`."""
        return OK, {
            "run": self._run,
            "records": self._num_records,
            "unreadable": self._num_unreadable,
            "minutes": self._windows.rows(),
        }

    def health(self) -> Answer:
        """`/health`: 200, or 503 and what is wrong."""
        health = self._health.look()
        body = {"run": self._run, "ok": not health.problems, **asdict(health)}
        return UNWELL if health.problems else OK, body
