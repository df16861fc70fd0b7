"""All that report and live page show of one run, folded from its log."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from threading import Lock

from rlstreams.schemas.events import DeadLetter, Event, PolicyLoaded, ScoredTrajectory, WorkerReport
from rlstreams.show.report.rows import SampleRows
from rlstreams.streams.log.topics import (
    DEAD_LETTERS,
    POLICY_PULLS,
    POLICY_VERSIONS,
    PROMPTS,
    SCORED,
    STEPS,
    TRAJECTORIES,
    WORKER_EVENTS,
    Topic,
)
from rlstreams.streams.views.feed import Views, ViewState

FIRST: tuple[Topic, ...] = (STEPS, POLICY_VERSIONS, POLICY_PULLS, DEAD_LETTERS, WORKER_EVENTS)
"""Small topics: with them the page has its curves."""
THEN: tuple[Topic, ...] = (PROMPTS, TRAJECTORIES)
LAST: tuple[Topic, ...] = (SCORED,)
"""For mismatch by sample alone."""
LETTERS = 1000  # kept, the newest
MARKS = 500  # of one kind on the timeline


@dataclass(slots=True)
class Life:
    """One process of a worker, from its first report to its last."""

    worker: str
    role: str
    host: str
    from_ms: int
    until_ms: int
    state: str  # the last one


class Timeline:
    """When processes lived; their pulls and checkpoints."""

    def __init__(self) -> None:
        self._lives: dict[tuple[str, str], Life] = {}
        self._saved: dict[tuple[str, str], float] = {}
        self.pulls: deque[tuple[str, int]] = deque(maxlen=MARKS)  # worker, ms
        self.checkpoints: deque[tuple[str, int]] = deque(maxlen=MARKS)

    def apply(self, event: Event) -> None:
        """Take one event; what is neither report nor pull is passed by."""
        if isinstance(event, PolicyLoaded):
            self.pulls.append((event.worker, event.loaded_at_ms))
        if not isinstance(event, WorkerReport):
            return
        key, at_ms = (event.worker, event.instance), event.at_ms
        life = self._lives.setdefault(
            key, Life(event.worker, event.role, event.host, at_ms, at_ms, event.state)
        )
        life.until_ms, life.state = max(life.until_ms, at_ms), event.state
        saved = event.counters.get("checkpoints", 0.0)
        if saved > self._saved.get(key, 0.0):
            self._saved[key] = saved
            self.checkpoints.append((event.worker, at_ms))

    @property
    def lives(self) -> Sequence[Life]:
        """By worker, then by time."""
        return sorted(self._lives.values(), key=lambda life: (life.worker, life.from_ms))


class RunFold:
    """A view over all topics. One thread feeds it, others may look, each under `lock`."""

    def __init__(self) -> None:
        self.lock = Lock()
        self.views = Views()
        self.samples = SampleRows()
        self.timeline = Timeline()
        self.letters: deque[DeadLetter] = deque(maxlen=LETTERS)  # without their bytes
        self.num_events = 0
        self._state: tuple[int, ViewState] = (-1, ViewState())

    def apply(self, event: Event) -> None:
        """Take one event."""
        with self.lock:
            self.num_events += 1
            self.samples.apply(event)
            if isinstance(event, ScoredTrajectory):  # the others take it from the trajectory
                return
            self.views.apply(event)
            self.timeline.apply(event)
            if isinstance(event, DeadLetter):
                self.letters.append(dataclasses.replace(event, value=b"", key=b""))

    @property
    def state(self) -> ViewState:
        """A snapshot of the views; the same until the next event."""
        with self.lock:
            if self._state[0] != self.num_events:
                self._state = self.num_events, self.views.state
            return self._state[1]
