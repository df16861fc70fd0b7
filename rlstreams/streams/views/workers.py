"""Views of workers: state, rates, time by state, restarts, weight pulls. Pure queries."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rlstreams.schemas.events import PolicyLoaded, ServerLoad
from rlstreams.streams.workers import Restart, Worker, Workers

NEWEST_PULLS = 20


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
    from_ms: int = 0  # first report of its first process
    host: str = ""
    release: str = ""  # of its code; empty: not reported
    server_loads: tuple[
        ServerLoad, ...
    ] = ()  # of the model servers that it uses; empty if it is silent


@dataclass(frozen=True, slots=True, kw_only=True)
class ThroughputState:
    """All workers, by name."""

    workers: tuple[WorkerView, ...] = ()
    restarts: tuple[Restart, ...] = ()
    now_ms: int = 0  # time of the newest report of all workers

    @property
    def roles(self) -> tuple[str, ...]:
        """Roles that have reported, by name."""
        return tuple(sorted({worker.role for worker in self.workers}))

    def seconds(self, role: str) -> Mapping[str, float]:
        """Return the time by state, summed over the workers of `role`."""
        sums: Counter[str] = Counter()
        for worker in self.workers:
            if worker.role == role:
                sums.update(worker.seconds)
        return dict(sums)


def throughput(workers: Workers) -> ThroughputState:
    """A snapshot."""
    return ThroughputState(
        workers=tuple(_shown(workers, worker) for _, worker in sorted(workers.by_name.items())),
        restarts=tuple(workers.restarts),
        now_ms=workers.now_ms,
    )


def _shown(workers: Workers, worker: Worker) -> WorkerView:
    life = worker.newest
    is_silent = workers.is_silent(life)
    return WorkerView(
        worker=life.worker,
        role=life.role,
        instance=life.instance,
        state="silent" if is_silent else life.state,
        detail=life.detail,
        policy_version=life.policy_version,
        restarts=len(worker.lives) - 1,
        rates={} if is_silent or life.state == "stopped" else worker.rates,
        totals=worker.totals,
        seconds=dict(worker.seconds),
        at_ms=life.at_ms,
        from_ms=next(iter(worker.lives.values())).from_ms,
        host=life.host,
        release=life.release,
        server_loads=() if is_silent or life.state == "stopped" else life.server_loads,
    )


def living(workers: Sequence[WorkerView]) -> list[WorkerView]:
    """Workers that report, and have not stopped."""
    return [worker for worker in workers if worker.state not in ("silent", "stopped")]


def releases_line(workers: Sequence[WorkerView]) -> str:
    """Releases of the workers that live, or did to the end of a run, with the workers of each; "":
    there is one."""
    found: dict[str, list[str]] = {}
    for worker in living(workers) or workers:
        found.setdefault(worker.release or "one that is not reported", []).append(worker.worker)
    if len(found) < 2:
        return ""
    return "; ".join(f"{release}: {', '.join(names)}" for release, names in found.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class PullsState:
    """Finished pulls of weights."""

    num_pulls: int = 0
    num_bytes: int = 0
    seconds: float = 0.0
    paused_s: float = 0.0
    newest: tuple[PolicyLoaded, ...] = ()  # the last `NEWEST_PULLS` loads


def pulls(workers: Workers) -> PullsState:
    """A snapshot."""
    so_far = workers.pulls
    return PullsState(
        num_pulls=so_far.num,
        num_bytes=so_far.num_bytes,
        seconds=so_far.seconds,
        paused_s=so_far.paused_s,
        newest=tuple(so_far.newest)[-NEWEST_PULLS:],
    )
