"""Progress of processes, read from the log: who has worked, owns the run, writes a checkpoint."""

from __future__ import annotations

from rlstreams.schemas.events import StepCompleted
from rlstreams.streams.log.record import Position
from rlstreams.streams.views.folds import Folds


class Progress:
    """Progress of each process, by the log.

    A trainer's work is steps: it claims, redoes, saves and drops groups in every life.
    """

    def __init__(self, folds: Folds) -> None:
        self._ledger, self._workers = folds.ledger, folds.workers
        self._trainers: set[str] = set()  # instances that made a step
        self._num_steps = 0
        self._ledger.listen(on_step=self._add)

    def _add(self, event: StepCompleted, _: Position) -> None:
        self._num_steps += 1
        self._trainers.add(event.instance)

    @property
    def num_events(self) -> int:
        """Number of samples, scores and steps."""
        return self._num_steps + self._workers.num_results

    def committed(self, instance: str) -> bool:
        """Whether this process has committed work."""
        return instance in self._trainers or self._workers.has_worked(instance)

    def has_started(self, instance: str) -> bool:
        """Whether it reported that it does more than to start."""
        life = self._workers.life(instance)
        return life is not None and life.has_started

    def is_saving(self, instance: str) -> bool:
        """Whether this process said last that it writes a checkpoint."""
        life = self._workers.life(instance)
        return life is not None and life.state == "saving"

    def owns_run(self, instance: str) -> bool:
        """Whether the newest claim is of this process."""
        claim = self._ledger.claim
        return claim is not None and claim.instance == instance

    @property
    def at_target(self) -> bool:
        """Whether the last step of the run is done."""
        return self._ledger.at_target
