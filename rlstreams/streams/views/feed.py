"""Views and their feed: pure queries of the folds, events in, frozen state out.

Live view, report and monitor show the same states, because they query the same folds. A fold uses
no clock and no bus: `apply` takes one event after another, in the order of its partition. `Views`
makes frozen snapshots; `Feed` delivers the events.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from rlstreams.schemas import DecodeError
from rlstreams.schemas.events import Event, Trajectory
from rlstreams.streams.log.bus import Bus
from rlstreams.streams.log.codec import decoded
from rlstreams.streams.log.read_to import DELIVERY_S, read_to
from rlstreams.streams.log.record import Partition, Position, RawRecord, Record
from rlstreams.streams.log.topics import (
    DEAD_LETTERS,
    POLICY_PULLS,
    POLICY_VERSIONS,
    PROMPTS,
    STEPS,
    TRAJECTORIES,
    WORKER_EVENTS,
    Topic,
)
from rlstreams.streams.samples.fold import OPEN
from rlstreams.streams.views.agents import AgentState, AgentsView
from rlstreams.streams.views.cost import CostState, cost
from rlstreams.streams.views.dead import DeadState, dead
from rlstreams.streams.views.evaluation import (
    AnswersView,
    EvaluationState,
    SamplesState,
    evaluation,
)
from rlstreams.streams.views.flow import FlowState, cut_shares, flow, oldest
from rlstreams.streams.views.folds import Folds
from rlstreams.streams.views.run import RunState, RunView
from rlstreams.streams.views.workers import PullsState, ThroughputState, pulls, throughput

WATCHED: tuple[Topic, ...] = (
    STEPS,
    POLICY_VERSIONS,
    POLICY_PULLS,
    WORKER_EVENTS,
    DEAD_LETTERS,
    PROMPTS,
    TRAJECTORIES,
)
_BATCH = 500


class View(Protocol):
    """A fold."""

    def apply(self, event: Event, position: Position | None = None) -> object:
        """Take one event and its record's position; events that the view does not use pass by."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ViewState:
    """All views at one moment."""

    run: RunState = field(default_factory=RunState)
    evaluation: EvaluationState = field(default_factory=EvaluationState)
    throughput: ThroughputState = field(default_factory=ThroughputState)
    samples: SamplesState = field(default_factory=SamplesState)
    pulls: PullsState = field(default_factory=PullsState)
    flow: FlowState = field(default_factory=FlowState)
    oldest: Mapping[str, int] = field(default_factory=dict)  # by topic, ms since 1970
    dead: DeadState = field(default_factory=DeadState)
    agents: tuple[AgentState, ...] = ()  # empty: the run has none, or `calls` is not read
    cost: CostState = field(default_factory=CostState)
    cut: Mapping[int, float] = field(default_factory=dict)  # share of truncated answers, by step

    @property
    def held_out(self) -> tuple[tuple[int, float], ...]:
        """(Step, accuracy) of each evaluation that will not change: a curve over steps."""
        return tuple(
            (self.run.step_of(p.policy_version), p.accuracy) for p in self.evaluation.curve
        )


class Views:
    """All views of a run, from one set of folds.

    Args:
        keeps: number of samples that the folds keep, see `Samples`.
    """

    def __init__(self, keeps: int = OPEN, folds: Folds | None = None) -> None:
        self.folds = folds or Folds(keeps=keeps)
        self.ledger, self.samples = self.folds.ledger, self.folds.samples
        self.workers = self.folds.workers
        self._run = RunView(self.ledger)
        self._answers = AnswersView()
        self._agents = AgentsView()

    def apply(self, event: Event, position: Position | None = None) -> bool:
        """Take one event; as `Folds.apply`."""
        if self._agents.apply(event, position):
            return False  # the event is about no sample
        counts = self.folds.apply(event, position)
        if counts and isinstance(event, Trajectory):
            self._answers.apply(event)
        return counts

    @property
    def judges(self) -> tuple[str, ...]:
        """Digests of the graders that judged the newest samples, as far as recorded."""
        return self._run.judges

    @property
    def evaluation(self) -> EvaluationState:
        """All evaluations so far."""
        return evaluation(self.samples)

    @property
    def flow(self) -> FlowState:
        """Samples that wait between roles."""
        return flow(self.samples, self.workers)

    @property
    def state(self) -> ViewState:
        """A snapshot of all views."""
        run, now = self._run.state, self.flow
        return ViewState(
            run=run,
            evaluation=self.evaluation,
            throughput=throughput(self.workers),
            samples=self._answers.state,
            pulls=pulls(self.workers),
            flow=now,
            oldest=oldest(self.samples, now.waiting),
            dead=dead(self.samples),
            agents=self._agents.state,
            cost=cost(run, self.samples, self.workers),
            cut=cut_shares(self.samples),
        )


class Feed:
    """Delivers the watched topics to a view, from their beginnings on; belongs to one thread.

    Args:
        on_record: called with each record after the view has taken its event, for callers that
            need its position.
    """

    def __init__(
        self,
        bus: Bus,
        view: View,
        topics: tuple[Topic, ...] = WATCHED,
        on_record: Callable[[Record[Event]], None] = lambda _record: None,
    ) -> None:
        self._bus = bus
        self._schemas = bus.schemas()
        self._view = view
        self._topics = topics
        self._on_record = on_record
        starts: dict[Partition, int] = {}
        for topic in topics:
            starts.update(bus.beginnings(topic.name))
        self._reader = bus.reader(starts)
        self._left: deque[RawRecord] = deque()  # read, and not applied yet
        self.num_unreadable = 0

    def poll(self, timeout_s: float) -> int:
        """Apply available records; return their number.

        Raises:
            StreamsError: the broker cannot be asked. Nothing is passed over: poll
                again.
        """
        if not self._left:
            self._left.extend(self._reader.poll(_BATCH, timeout_s))
        return self._apply()

    def _apply(self) -> int:
        num_records = len(self._left)
        while self._left:
            try:
                record = decoded(self._left[0], self._schemas)
            except DecodeError:
                # A view shows what it can; the role that consumes the record dead-letters it.
                self.num_unreadable += 1
                self._left.popleft()
                continue
            self._left.popleft()
            self._view.apply(record.event, record.position)
            self._on_record(record)
        return num_records

    def catch_up(self, deadline_s: float = DELIVERY_S) -> None:
        """Apply all records up to the topics' present ends.

        Raises:
            DeadlineError: nothing was delivered for `deadline_s`; names the partitions.
        """
        ends = self.ends()
        self._apply()
        for records in read_to(self._reader, ends, deadline_s, batch=_BATCH):
            self._left.extend(records)
            self._apply()

    def behind(self, ends: Mapping[Partition, int]) -> int:
        """Return the offsets between here and `ends`, over all partitions; 0: all were applied."""
        positions = self._reader.positions()
        left = sum(max(0, end - positions.get(partition, 0)) for partition, end in ends.items())
        return left + len(self._left)

    def ends(self) -> dict[Partition, int]:
        """Return the present ends of the watched topics."""
        ends: dict[Partition, int] = {}
        for topic in self._topics:
            ends.update(self._bus.ends(topic.name))
        return ends

    def close(self) -> None:
        """Release the reader; idempotent."""
        self._reader.close()
