"""Answers of the monitor: records in, JSON out. Pure but for the clocks of its health."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from rlstreams.schemas import DecodeError, SchemaTexts
from rlstreams.schemas.binary import NO_TEXTS
from rlstreams.show.monitor.health import HealthWatch
from rlstreams.show.monitor.windows import Json, WindowsView
from rlstreams.streams.log.codec import decoded
from rlstreams.streams.log.errors import StreamsError
from rlstreams.streams.log.parts import Assembler, Message
from rlstreams.streams.log.record import Partition
from rlstreams.streams.log.topics import (
    CONTROL,
    DEAD_LETTERS,
    POLICY_PULLS,
    POLICY_VERSIONS,
    STEPS,
    WORKER_EVENTS,
    Topic,
)

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
