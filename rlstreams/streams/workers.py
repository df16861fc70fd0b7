"""The life of a worker: the one fold of reports, weight pulls and leases.

A worker is a name, `rollout-0`; each of its processes is an *instance*. The instance whose first
report came last is the worker; later reports of an older one (a zombie) change its own life alone.
Reports of one instance older than its newest are passed by. A process that joins takes a name only
if no other process has it (`is_taken`): of two that ask for one, the second is passed by.

Clocks of hosts differ, and step. Silence and standstill are measured by the fold's clock alone. For
a log that is read later it is the first host's clock: another host's is aligned with it by that
host's first report, and a clock that was set back by the next report. A follower of a live log
reports how time passes (`passes`).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from rlstreams.schemas.events import (
    DeviceLease,
    Event,
    PolicyLoaded,
    PullRequested,
    ScoredTrajectory,
    ServerLoad,
    Trajectory,
    WorkerReport,
)
from rlstreams.streams.leases import Leases

SILENT_S = 6.0  # a worker without a report for so long is shown as silent
JOINING = "joining"  # state of a first report, which asks for a name
JOIN_S = 600.0  # longest time from that report to the next, once a model is loaded
STARTING = (JOINING, "starting")
JOINED_FROM = 1000  # lowest ordinal of workers that join; the configuration and `up` use lower ones
WINDOW_S = 10.0  # time that rates are over
STEP_MS = 60_000  # a report older than its host's last one by more shows a clock that was set back
KEPT = 500  # checkpoints, and loads, that are kept
# Counters of progress; time spent or a pull that failed is none.
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
# Counters of work that is not committed yet, or that every new process repeats, such as its first
# pull and a server's start; a judge's requests come, and are answered with 503, before there is a
# server.
_NO_WORK = frozenset({
    "sampled_tokens", "fetched_records", "pulls", "pull_s", "pulled_bytes", "failed_pulls",
    "given_up", "requests", "answers", "server_starts",
})  # fmt: skip
# Counters of a role's own work.
_WORK = ("samples", "evaluation_samples", "server_starts")


@dataclass(slots=True, kw_only=True)
class Life:
    """One process of a worker, as of its newest report. Times are milliseconds since 1970, by the
    clock of its host; `heard_ms`, `since_ms` and `moved_ms` by the fold's."""

    worker: str
    role: str
    instance: str
    host: str
    from_ms: int  # its first report
    at_ms: int
    since_ms: int  # first report of its present state
    moved_ms: int  # its begin, or its last progress (its start is progress)
    state: str
    detail: str
    policy_version: int
    counters: Mapping[str, float]
    heard_ms: int = 0  # its last report
    server_loads: tuple[ServerLoad, ...] = ()  # of the model servers that it uses
    release: str = ""  # of its code; empty: not reported
    has_started: bool = False  # it has reported another state than those of a start

    @property
    def is_joined(self) -> bool:
        """Whether it joined by itself: `up` and the configuration do not know it."""
        number = self.worker.rpartition("-")[2]
        return number.isdecimal() and int(number) >= JOINED_FROM


@dataclass(frozen=True, slots=True, kw_only=True)
class Restart:
    """A worker's return as another process."""

    worker: str
    role: str
    at_ms: int  # first report of the new process
    last_seen_ms: int  # last report of the old one
    was_clean: bool  # the old process had reported that it stops
    before: str = ""  # instance of the old process


@dataclass(frozen=True, slots=True, kw_only=True)
class Death:
    """A process that ended without a final report, and came back as another one."""

    worker: str
    role: str
    instance: str
    at_ms: int  # its last report
    worked_ms: int | None  # first work of a later process of this worker; None: not yet

    @property
    def seconds(self) -> float | None:
        """Time without this worker's work; None: it has not worked since."""
        return None if self.worked_ms is None else (self.worked_ms - self.at_ms) / 1000


@dataclass(slots=True)
class Worker:
    """One worker: its processes, the newest last, and their sums."""

    lives: dict[str, Life] = field(default_factory=dict)  # by instance
    window: deque[tuple[int, Mapping[str, float]]] = field(default_factory=deque)  # ms, counters
    seconds: dict[str, float] = field(default_factory=dict)  # by state

    @property
    def newest(self) -> Life:
        """The newest process, which is the worker."""
        return next(reversed(self.lives.values()))

    @property
    def totals(self) -> Mapping[str, float]:
        """Counters over all processes."""
        sums: Counter[str] = Counter()
        for life in self.lives.values():
            sums.update(life.counters)
        return dict(sums)

    @property
    def rates(self) -> Mapping[str, float]:
        """Counters per second over the newest `WINDOW_S` of the newest process's reports."""
        (first_ms, before), (last_ms, now) = self.window[0], self.window[-1]
        passed_s = (last_ms - first_ms) / 1000
        if passed_s <= 0:
            return {}
        return {name: (value - before.get(name, 0.0)) / passed_s for name, value in now.items()}


@dataclass(slots=True)
class Pulls:
    """Finished pulls of weights."""

    num: int = 0
    num_bytes: int = 0
    seconds: float = 0.0
    paused_s: float = 0.0
    newest: deque[PolicyLoaded] = field(default_factory=lambda: deque(maxlen=KEPT))


class Workers:
    """All workers of a run. `apply` takes every event."""

    def __init__(self) -> None:
        self.by_name: dict[str, Worker] = {}
        self.leases = Leases()
        self.pulling: dict[str, PullRequested] = {}  # unconfirmed pulls by worker
        self.pulls = Pulls()
        self.restarts: list[Restart] = []
        self.checkpoints: deque[tuple[str, int]] = deque(maxlen=KEPT)  # worker, ms
        self.num_results = 0  # trajectories and scores that were read
        self.now_ms = 0  # newest report of all, by the first host's clock
        self.clock_ms = 0  # the fold's clock, for silence and standstill
        self._host_ms: dict[str, int] = {}  # a host's last report, by its own clock
        self._ahead_ms: dict[str, int] = {}  # a host's clock less the first host's
        self.apart_ms: dict[str, int] = {}  # a host's clock less the log's follower's
        self._live_ms: int | None = None  # the fold's clock less the log's follower's
        self._lives: dict[str, Life] = {}  # by instance
        self._worked: set[str] = set()  # instances
        self._first_work_ms: dict[str, int] = {}  # by instance

    def apply(self, event: Event) -> None:
        """Take one event; events about no worker change nothing."""
        match event:
            case Trajectory() | ScoredTrajectory():
                self.num_results += 1
                self._worked.add(event.instance)
                if isinstance(event, Trajectory):
                    self.works(event.instance, event.finished_at_ms)
            case WorkerReport():
                self._report(event)
            case PullRequested():
                self.pulling[event.worker] = event
            case PolicyLoaded():
                self.pulling.pop(event.worker, None)
                self._pulled(event)
            case DeviceLease():
                self.leases.apply(event, self.clock_ms)

    @property
    def all(self) -> Sequence[Life]:
        """The newest process of each worker, by name."""
        return [worker.newest for _, worker in sorted(self.by_name.items())]

    @property
    def lives(self) -> Sequence[Life]:
        """Every process, by worker, then by time."""
        return sorted(self._lives.values(), key=lambda life: (life.worker, life.from_ms))

    def of(self, role: str) -> Sequence[Life]:
        """Return the workers of a role that have reported."""
        return [life for life in self.all if life.role == role]

    def asked(self, role: str, starting: Collection[str] = ()) -> Sequence[Life]:
        """Return the workers of a role that should work: without those that left, or have not
        joined yet, while others are there.

        Args:
            starting: workers with a newly started process.
        """
        workers = self.of(role)
        away = {w.worker for w in workers if w.state in ("stopped", JOINING)} - set(starting)
        return [w for w in workers if w.worker not in away] or workers

    def life(self, instance: str) -> Life | None:
        """Return the process; None: it has not reported."""
        return self._lives.get(instance)

    def has_worked(self, instance: str) -> bool:
        """Whether this process has output in the log, or counts such output."""
        return instance in self._worked

    @property
    def deaths(self) -> Sequence[Death]:
        """Processes that ended without a final report and came back, as they were noticed.

        Work is a sample, a score, an issued sample or a step; of a model server, its readiness.
        Its time is that of the trajectory or the step, else of the report that counts it.
        """
        found = []
        for restart in self.restarts:
            if not restart.was_clean:
                names = list(self.by_name[restart.worker].lives)
                later = names[names.index(restart.before) + 1 :]
                times_ms = [self._first_work_ms[n] for n in later if n in self._first_work_ms]
                found.append(
                    Death(
                        worker=restart.worker,
                        role=restart.role,
                        instance=restart.before,
                        at_ms=restart.last_seen_ms,
                        worked_ms=min(times_ms, default=None),
                    )
                )
        return found

    def works(self, instance: str, at_ms: int) -> None:
        """Note that this process has done work by `at_ms`; of a step its ledger's listener does."""
        self._first_work_ms[instance] = min(at_ms, self._first_work_ms.get(instance, at_ms))

    def passes(self, now_ms: int) -> None:
        """Advance the fold's clock; a follower calls it at the log's end, by a clock without steps.

        From the first call on this is the fold's clock, whatever the hosts' clocks.
        """
        if self._live_ms is None:
            self._live_ms = max(0, self.clock_ms - now_ms)
        self.clock_ms = max(self.clock_ms, now_ms + self._live_ms)

    def idle_s(self, instance: str, since_ms: int) -> float:
        """Return the seconds since `since_ms` for which a process has reported that it waits."""
        life = self._lives.get(instance)
        if life is None or life.state != "waiting":
            return 0.0
        return (self.clock_ms - max(life.since_ms, since_ms)) / 1000

    def is_silent(self, life: Life) -> bool:
        """Whether a report of this process is overdue, by the fold's clock."""
        age_ms = self.clock_ms - life.heard_ms
        limit_s = JOIN_S if life.state == JOINING else SILENT_S
        return age_ms > limit_s * 1000 and life.state != "stopped"

    def is_taken(self, name: str) -> bool:
        """Whether a process has this name: it reports, and has not reported that it stops."""
        worker = self.by_name.get(name)
        if worker is None or not worker.lives:  # no lives: the name was only asked for
            return False
        return worker.newest.state != "stopped" and not self.is_silent(worker.newest)

    def present(self, role: str) -> Sequence[Life]:
        """Return the workers of a role that are present."""
        return [life for life in self.of(role) if self.is_taken(life.worker)]

    def total(self, role: str, counter: str) -> float:
        """Return a counter's sum over all processes of a role."""
        of_role = (life for life in self._lives.values() if life.role == role)
        return sum(life.counters.get(counter, 0.0) for life in of_role)

    def _report(self, event: WorkerReport) -> None:
        heard_ms = self._tick(event)
        worker = self.by_name.setdefault(event.worker, Worker())
        life = worker.lives.get(event.instance)
        if life is None:
            if event.state != JOINING or not self.is_taken(event.worker):
                self._begin(worker, event, heard_ms)
        elif event.at_ms >= life.at_ms:
            self._go_on(worker, life, event, heard_ms)
        elif event.at_ms < life.at_ms - STEP_MS:
            worker.window.clear()
            self._go_on(worker, life, event, heard_ms)

    def _tick(self, event: WorkerReport) -> int:
        """Return the time of a report, by the fold's clock."""
        host, at_ms = event.host, event.at_ms
        if host not in self._ahead_ms:
            self._ahead_ms[host] = at_ms - self.now_ms if self._ahead_ms else 0
        elif at_ms < self._host_ms[host] - STEP_MS:
            self._ahead_ms[host] += at_ms - self._host_ms[host]
        self._host_ms[host] = at_ms
        heard_ms = at_ms - self._ahead_ms[host]
        self.now_ms = max(self.now_ms, heard_ms)
        if self._live_ms is not None:
            self.apart_ms[host] = at_ms - (self.clock_ms - self._live_ms)
            return self.clock_ms
        self.clock_ms = max(self.clock_ms, heard_ms)
        return heard_ms

    def _begin(self, worker: Worker, event: WorkerReport, heard_ms: int) -> None:
        if worker.lives:
            old = worker.newest
            restart = Restart(
                worker=event.worker, role=event.role, at_ms=event.at_ms, last_seen_ms=old.at_ms,
                was_clean=old.state in ("draining", "stopped"), before=old.instance,
            )  # fmt: skip
            self.restarts.append(restart)
            pull = self.pulling.get(event.worker)
            if pull is not None and pull.instance == old.instance:
                del self.pulling[event.worker]  # its predecessor's: nobody waits for it
        life = Life(
            worker=event.worker, role=event.role, instance=event.instance, host=event.host,
            from_ms=event.at_ms, at_ms=event.at_ms, since_ms=heard_ms, moved_ms=heard_ms,
            state=event.state, detail=event.detail, policy_version=event.policy_version,
            counters={}, release=event.release,
        )  # fmt: skip
        worker.lives[event.instance] = self._lives[event.instance] = life
        worker.window.clear()
        self._take(worker, life, event, heard_ms)

    def _go_on(self, worker: Worker, life: Life, event: WorkerReport, heard_ms: int) -> None:
        if life is not worker.newest:  # an older process cannot commit the work that it counts now
            life.at_ms, life.state, life.detail = event.at_ms, event.state, event.detail
            life.heard_ms = heard_ms
            return
        passed_s = max(0, event.at_ms - life.at_ms) / 1000
        worker.seconds[life.state] = worker.seconds.get(life.state, 0.0) + passed_s
        if event.state != life.state:
            life.since_ms = heard_ms
        if _moved(life, event):
            life.moved_ms = heard_ms
        self._take(worker, life, event, heard_ms)

    def _take(self, worker: Worker, life: Life, event: WorkerReport, heard_ms: int) -> None:
        if event.counters.get("checkpoints", 0.0) > life.counters.get("checkpoints", 0.0):
            self.checkpoints.append((event.worker, event.at_ms))
        life.at_ms, life.state, life.detail = event.at_ms, event.state, event.detail
        life.heard_ms = heard_ms
        life.policy_version, life.counters = event.policy_version, event.counters
        life.server_loads = event.loads
        life.has_started |= event.state not in STARTING
        if life.role != "trainer" and any(
            count for name, count in event.counters.items() if name not in _NO_WORK
        ):
            self._worked.add(event.instance)
        if any(event.counters.get(name) for name in _WORK):
            self.works(event.instance, event.at_ms)
        worker.window.append((event.at_ms, event.counters))
        start_ms = event.at_ms - WINDOW_S * 1000
        while len(worker.window) > 2 and worker.window[1][0] <= start_ms:
            worker.window.popleft()

    def _pulled(self, event: PolicyLoaded) -> None:
        pulls = self.pulls
        pulls.num, pulls.num_bytes = pulls.num + 1, pulls.num_bytes + event.num_bytes
        pulls.seconds += event.seconds
        pulls.paused_s += event.paused_s
        pulls.newest.append(event)


def _moved(life: Life, event: WorkerReport) -> bool:
    """Whether a report shows progress; a start is progress."""
    has_started = life.state in STARTING and event.state not in STARTING
    old, new = life.counters, event.counters
    return has_started or any(old.get(name, 0.0) != new.get(name, 0.0) for name in PROGRESS)
