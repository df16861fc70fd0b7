"""View of stages: how far every open sample has come, and what each worker did last.

A fold like the other views, with one difference: it is also given where a record lies, so that the
groups' committed positions say later who has finished what. Only open groups are kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from rlstreams.schemas.events import (
    TRAIN,
    ControlState,
    DeadLetter,
    Event,
    PolicyLoaded,
    PolicyPublished,
    Prompt,
    PullRequested,
    TrainerStarted,
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


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenSample:
    """A sample of an open training group."""

    group: int
    sample: int
    min_policy_version: int = -1
    issued_at_ms: int = 0
    prompt: Position | None = None  # where its record lies
    trajectory: Position | None = None
    is_rolled_out: bool = False
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


@dataclass(frozen=True, slots=True, kw_only=True)
class HopsState:
    """All that can hold up a step, as the topics tell it."""

    claim: TrainerStarted | None = None
    step: int = 0
    group_size: int = 0
    last_group: int = -1  # highest number that was issued
    newest_version: int = -1  # of the ledger
    published: frozenset[int] = frozenset()
    trainer_state: str = ""  # of the newest heartbeat
    control: str = "running"
    samples: tuple[OpenSample, ...] = ()  # of open groups, by number
    workers: tuple[WorkerHop, ...] = ()  # by name
    pulls: Mapping[str, PullRequested] = field(default_factory=dict)  # not confirmed, by worker

    def of(self, role: str) -> tuple[WorkerHop, ...]:
        """The workers of a role that have reported."""
        return tuple(worker for worker in self.workers if worker.role == role)

    @property
    def is_over(self) -> bool:
        """Whether the run has made all the steps that its newest claim is about."""
        return self.claim is not None and 0 < self.claim.step_target <= self.step


class HopsView:
    """Folds all topics but the scored trajectories, which carry the payloads a second time."""

    def __init__(self) -> None:
        self._ledger = Ledger(
            begins_anywhere=True,
            on_step=lambda _event, _: self._forget_closed(),
            on_drop=lambda _event, _: self._forget_closed(),
        )
        self._group_size = 0
        self._last_group = -1
        self._published: set[int] = set()
        self._control = "running"
        self._samples: dict[tuple[int, int], OpenSample] = {}
        # Of a sample whose prompt was not read yet: topics are read beside each other.
        self._early: dict[tuple[int, int], OpenSample] = {}
        self._workers: dict[str, tuple[WorkerHop, Mapping[str, float]]] = {}
        self._pulls: dict[str, PullRequested] = {}

    def apply(self, event: Event, position: Position | None = None) -> None:
        """Take one event, and where its record lies if that is known."""
        match event:
            case Prompt() | Trajectory() | DeadLetter():
                if event.purpose == TRAIN and issue_number(event.group_id) is not None:
                    self._move(event, position)
            case WorkerReport():
                self._report(event)
            case PullRequested():
                self._pulls[event.worker] = event
            case PolicyLoaded():
                self._pulls.pop(event.worker, None)
            case PolicyPublished():
                self._published.add(event.policy_version)
            case ControlState():
                self._control = event.state
            case _:
                self._ledger.apply(event)

    def _forget_closed(self) -> None:
        for kept in (self._samples, self._early):
            for key in [key for key in kept if self._ledger.is_closed(key[0])]:
                del kept[key]

    def _move(self, event: Prompt | Trajectory | DeadLetter, position: Position | None) -> None:
        key = (int(event.group_id), event.sample)
        if isinstance(event, Prompt):
            self._last_group = max(self._last_group, key[0])
        if self._ledger.is_closed(key[0]):
            return
        known = self._samples.get(key) or self._early.pop(key, None)
        known = known or OpenSample(group=key[0], sample=key[1])
        match event:
            case Prompt():
                self._group_size = event.group_size
                if key not in self._samples:  # the first record of a sample counts
                    known = replace(
                        known,
                        min_policy_version=event.min_policy_version,
                        issued_at_ms=event.issued_at_ms,
                        prompt=position,
                    )
                self._samples[key] = known
                return
            case Trajectory():
                if not known.is_rolled_out:
                    known = replace(
                        known,
                        trajectory=position,
                        is_rolled_out=True,
                        worker=event.worker,
                        finished_at_ms=event.finished_at_ms,
                    )
            case DeadLetter():
                known = replace(known, is_dead=True)
        (self._samples if key in self._samples else self._early)[key] = known

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
            pull = self._pulls.get(event.worker)
            if pull is not None and pull.instance == last.instance:
                del self._pulls[event.worker]  # its predecessor's: nobody waits for it
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

    @property
    def state(self) -> HopsState:
        """A snapshot."""
        ledger = self._ledger
        return HopsState(
            claim=ledger.claim,
            step=ledger.last_step,
            group_size=self._group_size,
            last_group=self._last_group,
            newest_version=ledger.policy_version,
            published=frozenset(self._published),
            trainer_state=ledger.heartbeat.state if ledger.heartbeat else "",
            control=self._control,
            samples=tuple(self._samples[key] for key in sorted(self._samples)),
            workers=tuple(self._workers[name][0] for name in sorted(self._workers)),
            pulls=dict(self._pulls),
        )
