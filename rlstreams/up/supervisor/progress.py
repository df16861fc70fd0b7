"""Progress of processes, read from the log: who has worked, owns the run, writes a checkpoint."""

from __future__ import annotations

from rlstreams.schemas.events import (
    Event,
    ScoredTrajectory,
    StepCompleted,
    Trajectory,
    WorkerReport,
)
from rlstreams.streams.ledger import Ledger
from rlstreams.streams.log.record import Position

# What is counted before anything of it is committed, or can be had again by every new process.
_NO_WORK = frozenset({"sampled_tokens", "fetched_records", "failed_pulls", "given_up"})


class Progress:
    """How far the log says that each process has come.

    A trainer's work is steps: it claims, redoes, saves and drops groups in every life.
    """

    def __init__(self) -> None:
        self.num_events = 0  # of work: samples, scores and steps
        self._instances: set[str] = set()
        self._started: set[str] = set()
        self._saving: set[str] = set()
        self._ledger = Ledger(begins_anywhere=True, on_step=self._add)

    def apply(self, event: Event) -> None:
        """Take one event."""
        self._ledger.apply(event)
        if isinstance(event, Trajectory | ScoredTrajectory):
            self.num_events += 1
            self._instances.add(event.instance)
        if not isinstance(event, WorkerReport):
            return
        if event.role != "trainer" and any(
            count for name, count in event.counters.items() if name not in _NO_WORK
        ):
            self._instances.add(event.instance)
        if event.state != "starting":
            self._started.add(event.instance)
        take = self._saving.add if event.state == "saving" else self._saving.discard
        take(event.instance)

    def _add(self, event: StepCompleted, _: Position) -> None:
        self.num_events += 1
        self._instances.add(event.instance)

    def committed(self, instance: str) -> bool:
        """Whether this process has."""
        return instance in self._instances

    def has_started(self, instance: str) -> bool:
        """Whether it reported that it does more than to start."""
        return instance in self._started

    def is_saving(self, instance: str) -> bool:
        """Whether this process said last that it writes a checkpoint."""
        return instance in self._saving

    def owns_run(self, instance: str) -> bool:
        """Whether the newest trainer's claim is its."""
        claim = self._ledger.claim
        return claim is not None and claim.instance == instance

    @property
    def at_target(self) -> bool:
        """Whether the last step of the run is done."""
        return self._ledger.at_target
