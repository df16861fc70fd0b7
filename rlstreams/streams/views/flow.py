"""How many samples have come how far: what waits between two roles, without asking a broker."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from rlstreams.schemas.events import (
    TRAIN,
    DeadLetter,
    Event,
    GroupsDropped,
    Prompt,
    StepCompleted,
    Trajectory,
    WorkerReport,
)
from rlstreams.streams.ledger import Ledger
from rlstreams.streams.log.record import Position
from rlstreams.streams.log.topics import PROMPTS, SCORED, TRAJECTORIES


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowState:
    """Samples so far. Waiting ones are differences, so they may lag a second behind."""

    issued: int = 0
    rolled_out: int = 0
    rolled_out_to_train: int = 0
    scored: int = 0  # as the log-prob workers count them
    closed: int = 0  # trained, or in a dropped group; dead ones are counted below, not here
    dead_at_rollout: int = 0
    dead_at_logprob: int = 0

    @property
    def waiting(self) -> dict[str, int]:
        """Samples in each topic that its reader has not finished, by topic."""
        scoring = self.rolled_out_to_train - self.scored - self.dead_at_logprob
        return {
            PROMPTS.name: max(0, self.issued - self.rolled_out - self.dead_at_rollout),
            TRAJECTORIES.name: max(0, scoring),
            SCORED.name: max(0, self.scored - self.closed),
        }


class FlowView:
    """Folds `prompts`, `trajectories`, `dead-letters`, `steps` and the counters of log-prob."""

    def __init__(self) -> None:
        self._ledger = Ledger(begins_anywhere=True, on_step=self._step, on_drop=self._drop)
        self._counts: Counter[str] = Counter()  # by the field of `FlowState`
        self._scored: dict[tuple[str, str], float] = {}  # by worker and instance
        self._dead: Counter[str] = Counter()  # by open group: its close closes none of them
        self._group_size = 0

    def apply(self, event: Event) -> None:
        """Take one event; what moves no sample is passed by."""
        if isinstance(event, Prompt):
            self._counts["issued"] += 1
            if event.purpose == TRAIN:
                self._group_size = event.group_size
        elif isinstance(event, Trajectory):
            self._counts["rolled_out"] += 1
            self._counts["rolled_out_to_train"] += event.purpose == TRAIN
        elif isinstance(event, DeadLetter):
            if event.role in ("rollout", "logprob"):
                self._counts[f"dead_at_{event.role}"] += 1
                self._dead[event.group_id] += event.purpose == TRAIN
        elif isinstance(event, WorkerReport):
            if event.role == "logprob":
                scored = event.counters.get("samples", 0.0)
                self._scored[(event.worker, event.instance)] = scored
        else:
            self._ledger.apply(event)

    def _step(self, event: StepCompleted, _: Position) -> None:
        groups = {sample.group_id for sample in event.samples}
        groups |= {absent.group_id for absent in event.absent}
        self._counts["closed"] += len(event.samples)
        self._count(len(event.absent), groups)

    def _drop(self, event: GroupsDropped, _: Position) -> None:
        groups = {group.group_id for group in event.groups}
        self._count(len(groups) * self._group_size, groups)

    def _count(self, num_closed: int, groups: set[str]) -> None:
        num_dead = sum(self._dead.pop(group, 0) for group in groups)
        self._counts["closed"] += max(0, num_closed - num_dead)

    @property
    def state(self) -> FlowState:
        """A snapshot."""
        return FlowState(**self._counts, scored=int(sum(self._scored.values())))
