"""View of stages: how far every open sample has come, and what each worker did last.

A fold like the other views, with one difference: it is also given where a record lies, so that the
groups' committed positions say later who has finished what. Only open groups are kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rlstreams.schemas.events import (
    TRAIN,
    ControlState,
    DeadLetter,
    Event,
    PolicyLoaded,
    PolicyPublished,
    Prompt,
    PullRequested,
    Trajectory,
    WorkerReport,
)
from rlstreams.streams.ledger import Ledger
from rlstreams.streams.log.group_ids import issue_number
from rlstreams.streams.log.record import Position

# Counters that say that something was done; time spent or a pull that failed is no progress.
PROGRESS = (
    "sampled_tokens",
    "samples",
    "groups",
    "steps",
    "micro_batches",
    "checkpoints",
    "fetched_records",
    "evaluation_samples",
    "dead_letters",
    "dropped_groups",
    "pulls",
)


@dataclass(slots=True, kw_only=True)
class OpenSample:
    """A sample of an open training group, as the first records of it say."""

    group: int
    sample: int
    is_issued: bool = False
    min_policy_version: int = -1
    issued_at_ms: int = 0
    prompt: Position | None = None  # where its record lies
    is_rolled_out: bool = False
    trajectory: Position | None = None
    worker: str = ""  # that rolled it out
    finished_at_ms: int = 0
    is_dead: bool = False

    @property
    def name(self) -> str:
        """`group/sample`."""
        return f"{self.group}/{self.sample}"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerHop:
    """A worker's newest report, and since when it is so. Times are milliseconds since 1970."""

    worker: str
    role: str
    instance: str
    state: str
    detail: str
    policy_version: int
    at_ms: int
    since_ms: int  # first report of this state
    moved_ms: int  # when it began, or last finished something (its start is one)


class HopsView:
    """Folds all topics but the scored trajectories, which carry the payloads a second time."""

    def __init__(self) -> None:
        self.ledger = Ledger(
            begins_anywhere=True,
            on_step=lambda _event, _: self._forget_closed(),
            on_drop=lambda _event, _: self._forget_closed(),
        )
        self.group_size = 0
        self.last_group = -1  # highest number that was issued
        self.published: set[int] = set()  # versions
        self.control = "running"
        self.pulls: dict[str, PullRequested] = {}  # not confirmed, by worker
        # Of open groups. Topics are read beside each other: the prompt of some was not read yet.
        self._samples: dict[tuple[int, int], OpenSample] = {}
        self._workers: dict[str, tuple[WorkerHop, Mapping[str, float]]] = {}

    @property
    def samples(self) -> Sequence[OpenSample]:
        """Issued samples of open groups, by number."""
        return [s for _, s in sorted(self._samples.items()) if s.is_issued]

    @property
    def workers(self) -> Sequence[WorkerHop]:
        """All that have reported, by name."""
        return [worker for _, (worker, _) in sorted(self._workers.items())]

    def of(self, role: str) -> Sequence[WorkerHop]:
        """The workers of a role that have reported."""
        return [worker for worker in self.workers if worker.role == role]

    @property
    def trainer_state(self) -> str:
        """Of the newest heartbeat."""
        return self.ledger.heartbeat.state if self.ledger.heartbeat else ""

    def apply(self, event: Event, position: Position | None = None) -> None:
        """Take one event, and where its record lies if that is known."""
        match event:
            case Prompt() | Trajectory() | DeadLetter():
                if event.purpose == TRAIN and issue_number(event.group_id) is not None:
                    self._move(event, position)
            case WorkerReport():
                self._report(event)
            case PullRequested():
                self.pulls[event.worker] = event
            case PolicyLoaded():
                self.pulls.pop(event.worker, None)
            case PolicyPublished():
                self.published.add(event.policy_version)
            case ControlState():
                self.control = event.state
            case _:
                self.ledger.apply(event)

    def _forget_closed(self) -> None:
        for key in [key for key in self._samples if self.ledger.is_closed(key[0])]:
            del self._samples[key]

    def _move(self, event: Prompt | Trajectory | DeadLetter, position: Position | None) -> None:
        group = int(event.group_id)
        if isinstance(event, Prompt):
            self.last_group = max(self.last_group, group)
        if self.ledger.is_closed(group):
            return
        fresh = OpenSample(group=group, sample=event.sample)
        sample = self._samples.setdefault((group, event.sample), fresh)
        match event:
            case Prompt():
                self.group_size = event.group_size
                if not sample.is_issued:  # the first record of a sample counts
                    sample.is_issued, sample.prompt = True, position
                    sample.min_policy_version = event.min_policy_version
                    sample.issued_at_ms = event.issued_at_ms
            case Trajectory():
                if not sample.is_rolled_out:
                    sample.is_rolled_out, sample.trajectory = True, position
                    sample.worker, sample.finished_at_ms = event.worker, event.finished_at_ms
            case DeadLetter():
                sample.is_dead = True

    def _report(self, event: WorkerReport) -> None:
        counters = {name: event.counters.get(name, 0.0) for name in PROGRESS}
        last, counted = self._workers.get(event.worker, (None, counters))
        since_ms = moved_ms = event.at_ms
        if last is not None and last.instance == event.instance:
            if event.at_ms < last.at_ms:
                return
            if event.state == last.state:
                since_ms = last.since_ms
            has_started = last.state == "starting" != event.state
            if counted == counters and not has_started:
                moved_ms = last.moved_ms
        elif last is not None:
            pull = self.pulls.get(event.worker)
            if pull is not None and pull.instance == last.instance:
                del self.pulls[event.worker]  # its predecessor's: nobody waits for it
        hop = WorkerHop(
            worker=event.worker,
            role=event.role,
            instance=event.instance,
            state=event.state,
            detail=event.detail,
            policy_version=event.policy_version,
            at_ms=event.at_ms,
            since_ms=since_ms,
            moved_ms=moved_ms,
        )
        self._workers[event.worker] = (hop, counters)
