"""View of workers: state, rates, time by state, restarts, weight pulls."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rlstreams.schemas.events import Event, PolicyLoaded, WorkerReport

WINDOW_S = 10.0
NEWEST_PULLS = 20
SILENT_S = 6.0  # a worker that reported nothing for this long is shown as silent


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerView:
    """One worker, as of its newest report."""

    worker: str
    role: str
    instance: str
    state: str  # as reported, or "silent"
    detail: str
    policy_version: int
    restarts: int  # instances seen after the first
    rates: Mapping[str, float]  # counters per second over the window
    totals: Mapping[str, float]  # counters over all instances
    seconds: Mapping[str, float]  # time by state
    at_ms: int
    host: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Restart:
    """A worker came back as another process."""

    worker: str
    role: str
    at_ms: int  # first report of the new process
    last_seen_ms: int  # last report of the old one
    was_clean: bool  # the old process had said that it stops


@dataclass(frozen=True, slots=True, kw_only=True)
class ThroughputState:
    """All workers, by name."""

    workers: tuple[WorkerView, ...] = ()
    restarts: tuple[Restart, ...] = ()
    now_ms: int = 0  # newest report of all: the fold's clock

    @property
    def roles(self) -> tuple[str, ...]:
        """Roles that reported, in order of name."""
        return tuple(sorted({worker.role for worker in self.workers}))

    def total(self, role: str, counter: str) -> float:
        """`counter` since the run began, summed over the workers of `role`."""
        return sum(w.totals.get(counter, 0.0) for w in self.workers if w.role == role)

    def seconds(self, role: str) -> Mapping[str, float]:
        """Time by state, summed over the workers of `role`."""
        sums: Counter[str] = Counter()
        for worker in self.workers:
            if worker.role == role:
                sums.update(worker.seconds)
        return dict(sums)


@dataclass(slots=True)
class _Worker:
    last: WorkerReport
    window: deque[WorkerReport]
    instances: set[str]
    ended: Counter[str] = field(default_factory=Counter)  # counters of earlier instances
    seconds: dict[str, float] = field(default_factory=dict)


class ThroughputView:
    """Folds `worker-events`. Rates are over the newest `WINDOW_S` of each worker's reports.

    Clocks of hosts differ. Which worker is silent is asked of one clock, the first host's: another
    host's is put beside it by its first report, which was written when ours had come so far.
    """

    def __init__(self) -> None:
        self._workers: dict[str, _Worker] = {}
        self._restarts: list[Restart] = []
        self._ahead_ms: dict[str, int] = {}  # a host's clock, of the fold's
        self._now_ms = 0  # the fold's clock

    def apply(self, event: Event) -> None:
        """Take one event; all but `WorkerReport` are passed by, and so are zombies."""
        if not isinstance(event, WorkerReport):
            return
        ahead_ms = self._ahead_ms.setdefault(
            event.host, event.at_ms - self._now_ms if self._ahead_ms else 0
        )
        self._now_ms = max(self._now_ms, event.at_ms - ahead_ms)
        worker = self._workers.get(event.worker)
        if worker is None:
            self._workers[event.worker] = _Worker(event, deque([event]), {event.instance})
        elif event.instance == worker.last.instance:
            passed_s = max(0, event.at_ms - worker.last.at_ms) / 1000
            state = worker.last.state
            worker.seconds[state] = worker.seconds.get(state, 0.0) + passed_s
            self._advance(worker, event)
        elif event.instance not in worker.instances:
            self._restart(worker, event)

    def _advance(self, worker: _Worker, event: WorkerReport) -> None:
        worker.last = event
        worker.window.append(event)
        start_ms = event.at_ms - WINDOW_S * 1000
        while len(worker.window) > 2 and worker.window[1].at_ms <= start_ms:
            worker.window.popleft()

    def _restart(self, worker: _Worker, event: WorkerReport) -> None:
        old = worker.last
        self._restarts.append(
            Restart(
                worker=event.worker,
                role=event.role,
                at_ms=event.at_ms,
                last_seen_ms=old.at_ms,
                was_clean=old.state in ("draining", "stopped"),
            )
        )
        worker.ended.update(old.counters)
        worker.instances.add(event.instance)
        worker.window = deque([event])
        worker.last = event

    @property
    def restarts(self) -> Sequence[Restart]:
        """As in `state`, without a snapshot of all the rest: for who asks after each event."""
        return self._restarts

    @property
    def state(self) -> ThroughputState:
        """A snapshot."""
        return ThroughputState(
            workers=tuple(self._worker_view(self._workers[name]) for name in sorted(self._workers)),
            restarts=tuple(self._restarts),
            now_ms=self._now_ms,
        )

    def _worker_view(self, worker: _Worker) -> WorkerView:
        last = worker.last
        age_ms = self._now_ms - (last.at_ms - self._ahead_ms[last.host])
        is_silent = age_ms > SILENT_S * 1000 and last.state != "stopped"
        totals = Counter(worker.ended)
        totals.update(last.counters)
        is_idle = is_silent or last.state == "stopped"
        return WorkerView(
            worker=last.worker,
            role=last.role,
            instance=last.instance,
            state="silent" if is_silent else last.state,
            detail=last.detail,
            policy_version=last.policy_version,
            restarts=len(worker.instances) - 1,
            rates={} if is_idle else _rates(worker.window),
            totals=dict(totals),
            seconds=dict(worker.seconds),
            at_ms=last.at_ms,
            host=last.host,
        )


def _rates(window: deque[WorkerReport]) -> dict[str, float]:
    first, last = window[0], window[-1]
    passed_s = (last.at_ms - first.at_ms) / 1000
    if passed_s <= 0:
        return {}
    return {
        name: (value - first.counters.get(name, 0.0)) / passed_s
        for name, value in last.counters.items()
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class PullsState:
    """Finished pulls of weights."""

    num_pulls: int = 0
    num_bytes: int = 0
    seconds: float = 0.0
    paused_s: float = 0.0
    newest: tuple[PolicyLoaded, ...] = ()  # the last `NEWEST_PULLS`


class PullsView:
    """Folds `policy-pulls`."""

    def __init__(self) -> None:
        self.state = PullsState()

    def apply(self, event: Event) -> None:
        """Take one event; all but finished pulls are passed by."""
        if isinstance(event, PolicyLoaded):
            so_far = self.state
            self.state = PullsState(
                num_pulls=so_far.num_pulls + 1,
                num_bytes=so_far.num_bytes + event.num_bytes,
                seconds=so_far.seconds + event.seconds,
                paused_s=so_far.paused_s + event.paused_s,
                newest=(*so_far.newest, event)[-NEWEST_PULLS:],
            )
