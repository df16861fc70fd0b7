"""Views and their feed: pure folds over the topics, events in, frozen state out.

Live view, report and monitor show the same states, because they run the same folds. A fold knows
no clock and no bus: `apply` takes one event after another, in the order of its partition, and
`state` is a frozen snapshot. `Views` runs all of them; `Feed` brings the events.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from rlstreams.schemas import DecodeError
from rlstreams.schemas.events import Event
from rlstreams.streams.log.bus import Bus
from rlstreams.streams.log.codec import decoded
from rlstreams.streams.log.read_to import read_to
from rlstreams.streams.log.record import Partition, RawRecord, Record
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
from rlstreams.streams.views.dead import DeadState, DeadView
from rlstreams.streams.views.evaluation import (
    EvaluationState,
    EvaluationView,
    SamplesState,
    SamplesView,
)
from rlstreams.streams.views.flow import FlowState, FlowView
from rlstreams.streams.views.run import RunState, RunView
from rlstreams.streams.views.workers import (
    PullsState,
    PullsView,
    ThroughputState,
    ThroughputView,
)

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
    """A fold. Its `state` is a frozen snapshot of its own type."""

    def apply(self, event: Event) -> None:
        """Take one event; what the view does not know is passed by."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ViewState:
    """All views at one moment."""

    run: RunState = field(default_factory=RunState)
    evaluation: EvaluationState = field(default_factory=EvaluationState)
    throughput: ThroughputState = field(default_factory=ThroughputState)
    samples: SamplesState = field(default_factory=SamplesState)
    pulls: PullsState = field(default_factory=PullsState)
    flow: FlowState = field(default_factory=FlowState)
    dead: DeadState = field(default_factory=DeadState)

    @property
    def held_out(self) -> tuple[tuple[int, float], ...]:
        """(Step, accuracy) of each evaluation that will not move: its curve beside the steps'."""
        return tuple(
            (self.run.step_of(p.policy_version), p.accuracy) for p in self.evaluation.curve
        )


class Views:
    """Every fold, fed with the same events."""

    def __init__(self) -> None:
        self.run = RunView()
        self.evaluation = EvaluationView()
        self.flow = FlowView()
        self._views: dict[str, Any] = {  # by the field of `ViewState`
            "run": self.run,
            "evaluation": self.evaluation,
            "throughput": ThroughputView(),
            "samples": SamplesView(),
            "pulls": PullsView(),
            "flow": self.flow,
            "dead": DeadView(),
        }

    def apply(self, event: Event) -> None:
        """Take one event."""
        for view in self._views.values():
            view.apply(event)

    @property
    def state(self) -> ViewState:
        """A snapshot of all."""
        return ViewState(**{name: view.state for name, view in self._views.items()})


class Feed:
    """Brings the watched topics to a view, from their beginnings on; belongs to one thread.

    Args:
        on_record: called with each record after the view has taken its event, for who needs to
            know where it lies.
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
        """Apply what is there; returns how many records that was.

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
            self._view.apply(record.event)
            self._on_record(record)
        return num_records

    def catch_up(self, deadline_s: float) -> None:
        """Apply all up to where the topics end now.

        Raises:
            DeadlineError: nothing was delivered for `deadline_s`; names the partitions.
        """
        ends = self.ends()
        self._apply()
        for records in read_to(self._reader, ends, deadline_s, batch=_BATCH):
            self._left.extend(records)
            self._apply()

    def behind(self, ends: Mapping[Partition, int]) -> int:
        """Offsets between here and `ends`, over all partitions; 0: all of them was applied."""
        positions = self._reader.positions()
        left = sum(max(0, end - positions.get(partition, 0)) for partition, end in ends.items())
        return left + len(self._left)

    def ends(self) -> dict[Partition, int]:
        """Where the watched topics end now."""
        ends: dict[Partition, int] = {}
        for topic in self._topics:
            ends.update(self._bus.ends(topic.name))
        return ends

    def close(self) -> None:
        """Release the reader; idempotent."""
        self._reader.close()
