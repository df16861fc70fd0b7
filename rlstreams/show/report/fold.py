"""All that report and live page show of one run, folded from its log."""

from __future__ import annotations

import dataclasses
from collections import deque
from threading import Lock

from rlstreams.schemas.events import DeadLetter, Event
from rlstreams.streams.log.record import Position
from rlstreams.streams.log.topics import (
    CALLS,
    DEAD_LETTERS,
    OUTCOMES,
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
LAST: tuple[Topic, ...] = (SCORED, CALLS, OUTCOMES)
"""Topics for mismatch by sample, and for the places of sessions."""
LETTERS = 1000  # dead letters kept, the newest
KEPT = 300_000  # samples, the newest


class RunFold:
    """A view over all topics. One thread feeds it, others may look, each under `lock`."""

    def __init__(self) -> None:
        self.lock = Lock()
        self.views = Views(keeps=KEPT)
        self.samples, self.workers = self.views.samples, self.views.workers
        self.letters: deque[DeadLetter] = deque(maxlen=LETTERS)  # without their bytes
        self.num_events = 0
        self._state: tuple[int, ViewState] = (-1, ViewState())

    def apply(self, event: Event, position: Position | None = None) -> None:
        """Take one event."""
        with self.lock:
            self.num_events += 1
            self.views.apply(event, position)
            if isinstance(event, DeadLetter):
                self.letters.append(dataclasses.replace(event, value=b"", key=b""))

    @property
    def state(self) -> ViewState:
        """A snapshot of the views; the same until the next event."""
        with self.lock:
            if self._state[0] != self.num_events:
                self._state = self.num_events, self.views.state
            return self._state[1]
