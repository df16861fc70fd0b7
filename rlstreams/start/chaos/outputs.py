"""What the log says of a run under faults: who committed what when, and tokens made twice."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from rlstreams.schemas.events import (
    Event,
    PolicyLoaded,
    Prompt,
    ScoredTrajectory,
    StepCompleted,
    Trajectory,
    WorkerReport,
)
from rlstreams.streams.ledger import Ledger
from rlstreams.streams.log.bus import Bus
from rlstreams.streams.log.record import Position
from rlstreams.streams.log.topics import (
    POLICY_PULLS,
    PROMPTS,
    SCORED,
    STEPS,
    TRAJECTORIES,
    WORKER_EVENTS,
)
from rlstreams.streams.run.run_log import BusLog

TOPICS = (PROMPTS, TRAJECTORIES, SCORED, STEPS, WORKER_EVENTS, POLICY_PULLS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """Sampled tokens, evaluations included."""

    sampled: int  # as the engines counted them, up to each process's last report
    unreported: int  # estimate: between a killed process's last report and its death
    useful: int  # in the first trajectory of each sample

    @property
    def regenerated_share(self) -> float:
        """Of all tokens, those that are in no first trajectory."""
        total = self.sampled + self.unreported
        return max(0.0, 1.0 - self.useful / total) if total else 0.0


@dataclass(slots=True)
class _Reports:
    first_ms: int
    last_ms: int
    sampled: float = 0.0


@dataclass
class Outputs:
    """Folds the topics of samples and steps. Times are those at which records were handed over."""

    _times: dict[str, list[tuple[int, str]]] = field(default_factory=lambda: defaultdict(list))
    _reports: dict[str, _Reports] = field(default_factory=dict)  # of rollout, by instance
    _seen: set[tuple[str, int]] = field(default_factory=set)
    _useful: int = 0
    _at_ms: int = 0  # of the newest event

    def __post_init__(self) -> None:
        self._ledger = Ledger(begins_anywhere=True, on_step=self._step)

    _is_sorted: bool = False

    def apply(self, event: Event, at_ms: int) -> None:
        """Take one event that was handed to the client at `at_ms`."""
        self._at_ms = at_ms
        if isinstance(event, Prompt):
            self._times["prompts-0"].append((at_ms, ""))
        elif isinstance(event, Trajectory):
            self._times[event.worker].append((at_ms, event.instance))
            self._first(event)
        elif isinstance(event, ScoredTrajectory):
            self._times[event.worker].append((at_ms, event.instance))
        elif isinstance(event, PolicyLoaded):
            self._times[f"{event.worker} loads"].append((at_ms, event.instance))
        elif isinstance(event, WorkerReport):
            self._times[f"{event.worker} reports"].append((at_ms, event.instance))
            if event.role == "rollout":
                self._report(event)
        else:
            self._ledger.apply(event)

    def _step(self, event: StepCompleted, _: Position) -> None:
        self._times["trainer-0"].append((self._at_ms, event.instance))

    def next_ms(self, worker: str, after_ms: int, not_by: str = "") -> int | None:
        """When `worker` first committed something after `after_ms`, by another process than
        `not_by`; None if it never did."""
        if not self._is_sorted:
            for times in self._times.values():
                times.sort()
            self._is_sorted = True
        times = self._times.get(worker, [])
        found = (
            at_ms
            for at_ms, instance in times[bisect_left(times, (after_ms, "")) :]
            if not not_by or instance != not_by
        )
        return next(found, None)

    def back_ms(self, worker: str, after_ms: int, not_by: str) -> int | None:
        """When a successor of process `not_by` first committed anything, a report included."""
        return self.next_ms(f"{worker} reports", after_ms, not_by)

    def loaded_ms(self, worker: str, after_ms: int) -> int | None:
        """When `worker` first held a version again that it pulled after `after_ms`."""
        return self.next_ms(f"{worker} loads", after_ms)

    def next_of_role(self, role: str, after_ms: int) -> int | None:
        """When anybody of `role` first committed something after `after_ms`."""
        names = [
            name
            for name in self._times
            if name.startswith(f"{role}-") and not name.endswith((" reports", " loads"))
        ]
        found = [self.next_ms(name, after_ms) for name in names]
        return min((at_ms for at_ms in found if at_ms is not None), default=None)

    def tokens(self, deaths_ms: Mapping[str, int]) -> Tokens:
        """Sampled and useful tokens.

        Args:
            deaths_ms: when rollout processes were killed, by instance.
        """
        total = sum(r.sampled for r in self._reports.values())
        seconds = sum(r.last_ms - r.first_ms for r in self._reports.values()) / 1000
        mean_rate = total / seconds if seconds else 0.0
        unreported = sum(
            mean_rate * max(0, deaths_ms[instance] - reports.last_ms) / 1000
            for instance, reports in self._reports.items()
            if instance in deaths_ms
        )
        return Tokens(sampled=round(total), unreported=round(unreported), useful=self._useful)

    def _first(self, event: Trajectory) -> None:
        key = (event.group_id, event.sample)
        if key not in self._seen:
            self._seen.add(key)
            self._useful += sum(
                segment.token_ids.shape[0]
                for segment in event.segments
                if segment.author == "policy"
            )

    def _report(self, event: WorkerReport) -> None:
        at_ms = event.at_ms
        reports = self._reports.setdefault(event.instance, _Reports(at_ms, at_ms))
        reports.last_ms = max(reports.last_ms, at_ms)
        reports.sampled = max(reports.sampled, event.counters.get("sampled_tokens", 0.0))


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
