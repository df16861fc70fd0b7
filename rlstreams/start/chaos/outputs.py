"""Who committed work when, as the log of a run under faults says."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from rlstreams.schemas.events import (
    Event,
    PolicyLoaded,
    Prompt,
    ScoredTrajectory,
    StepCompleted,
    Trajectory,
)
from rlstreams.streams.ledger import Ledger
from rlstreams.streams.log.bus import Bus
from rlstreams.streams.log.record import Position
from rlstreams.streams.log.topics import POLICY_PULLS, PROMPTS, SCORED, STEPS, TRAJECTORIES
from rlstreams.streams.run.run_log import BusLog

TOPICS = (PROMPTS, TRAJECTORIES, SCORED, STEPS, POLICY_PULLS)
LOADS = " loads"  # behind the name of a worker: the versions that it pulled


@dataclass
class Outputs:
    """Folds the topics of samples and steps. Times are those at which records were handed over."""

    _times: dict[str, list[tuple[int, str]]] = field(default_factory=lambda: defaultdict(list))
    _at_ms: int = 0  # of the newest event

    def __post_init__(self) -> None:
        self._ledger = Ledger(begins_anywhere=True, on_step=self._step)

    def apply(self, event: Event, at_ms: int) -> None:
        """Take one event that was handed to the client at `at_ms`."""
        self._at_ms = at_ms
        if isinstance(event, Prompt):
            self._times["prompts-0"].append((at_ms, ""))
        elif isinstance(event, Trajectory | ScoredTrajectory):
            self._times[event.worker].append((at_ms, event.instance))
        elif isinstance(event, PolicyLoaded):
            self._times[f"{event.worker}{LOADS}"].append((at_ms, event.instance))
        else:
            self._ledger.apply(event)

    def _step(self, event: StepCompleted, _: Position) -> None:
        self._times["trainer-0"].append((self._at_ms, event.instance))

    def next_ms(self, worker: str, after_ms: int, not_by: str = "") -> int | None:
        """When `worker` first committed something after `after_ms`, by another process than
        `not_by`; None if it never did."""
        found = (
            at_ms
            for at_ms, instance in self._times.get(worker, ())
            if at_ms >= after_ms and (not not_by or instance != not_by)
        )
        return min(found, default=None)

    def next_of_rollout(self, after_ms: int) -> int | None:
        """When any rollout worker first committed something after `after_ms`."""
        names = [n for n in self._times if n.startswith("rollout-") and not n.endswith(LOADS)]
        found = (self.next_ms(name, after_ms) for name in names)
        return min((at_ms for at_ms in found if at_ms is not None), default=None)


def read_outputs(bus: Bus) -> Outputs:
    """All that the topics hold now; what cannot be read, the audit counts.

    Raises:
        DeadlineError: a topic did not deliver up to its end.
    """
    outputs, log = Outputs(), BusLog(bus, "chaos")
    for topic in TOPICS:
        for record in log.read_topic(topic, skip_unreadable=True):
            outputs.apply(record.event, record.raw.timestamp_ms)
    return outputs
