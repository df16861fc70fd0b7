"""Reports of workers: a worker's own, one record per second; and the newest of others."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

from rlstreams.schemas.events import NO_VERSION, ServerLoad, WorkerReport
from rlstreams.streams.addresses import is_loopback
from rlstreams.streams.log.bus import Bus, Closing
from rlstreams.streams.log.codec import now_ms, outgoing
from rlstreams.streams.log.record import Outgoing, Partition
from rlstreams.streams.log.topics import WORKER_EVENTS
from rlstreams.workers.loop.context import Context
from rlstreams.workers.loop.foreign import EventReader
from rlstreams.workers.loop.host import host_name, release
from rlstreams.workers.loop.stall import StuckWatch, limits_of

EVERY_S = 1.0
MAX_POLL = 1000
LINE_EVERY_S = 10.0  # in the worker's own log, for terminals
_RATES = ("tokens", "samples", "groups", "steps")  # counters with a rate in that line, if they grow


class Reporter:
    """Counts and states of one process; counters only grow."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._counters: defaultdict[str, float] = defaultdict(float)
        self._state = ("starting", "")
        self._next = 0.0
        self._next_line = 0.0
        self._logged: tuple[float, Mapping[str, float]] = (time.monotonic(), {})  # last line's
        self._stuck = StuckWatch(context.worker, context.role, limits_of(context.config))
        self.policy_version = NO_VERSION
        self._servers: Mapping[str, str] = {}
        self.server_loads: Sequence[ServerLoad] = ()  # of the model servers that the worker uses
        self.gateway = ""  # its address, for other workers
        self.figures: Mapping[str, object] = {}  # for `/load` alone

    def count(self, **amounts: float) -> None:
        """Add to counters, e.g. `count(tokens=7, busy_s=0.2)`."""
        for name, amount in amounts.items():
            self._counters[name] += amount

    def state(self, name: str, detail: str = "") -> None:
        """Set the worker's state and the thing it waits for; a change is reported at once."""
        if (name, detail) != self._state:
            if name != self._state[0]:
                self._next = 0.0
            self._state = (name, detail)

    def servers(self, states: Mapping[str, str]) -> None:
        """Set the state of each model server that the worker uses; a change is reported at once."""
        if states != self._servers:
            self._servers, self._next = states, 0.0

    def due(self) -> list[Outgoing]:
        """The report, if it is time for one. Call it in every tick.

        Raises:
            StuckError: this worker reports that it works, and has finished nothing for too long.
        """
        now = time.monotonic()
        if news := self._stuck.look(now, *self._state, self._counters):
            self._context.log.warning("starving", what=news)
        if now < self._next:
            return []
        self._next = now + EVERY_S
        report = WorkerReport(
            worker=self._context.worker,
            role=self._context.role,
            instance=self._context.instance,
            state=self._state[0],
            detail=self._state[1],
            policy_version=self.policy_version,
            counters=dict(self._counters),
            at_ms=now_ms(),
            host=host_name(),
            servers=dict(self._servers),
            loads=tuple(self.server_loads),
            gateway=self.gateway,
            release=release(),
        )
        self._context.on_report(report, self.figures)
        if now >= self._next_line:
            self._next_line = now + LINE_EVERY_S
            self._log_line(now)
        return [outgoing(WORKER_EVENTS, report)]

    def _log_line(self, now_s: float) -> None:
        """Log state and version, and rates since the last line."""
        (since_s, before), counted = self._logged, dict(self._counters)
        self._logged = now_s, counted
        span_s = max(now_s - since_s, 1e-3)
        rates = {
            f"{name}_per_s": round((counted[name] - before.get(name, 0.0)) / span_s, 1)
            for name in _RATES
            if counted.get(name)
        }
        version = (
            {} if self.policy_version == NO_VERSION else {"policy_version": self.policy_version}
        )
        self._context.log.info(
            "state", state=" ".join(filter(None, self._state)), **version, **rates
        )

    def last_report(self) -> list[Outgoing]:
        """The last report before a clean end: silence after it is no crash."""
        self.state("stopped")
        self._next = 0.0
        return self.due()


class NewestReports(Closing):
    """The newest report of each worker that names an address: a fold of `worker-events`, and its
    reader. A loopback address that another host's worker names is another process there, so that
    worker names none. Belongs to the role's loop, but for `alive`.

    Args:
        start: offset by partition.
        name: of the reader, for the log.
        address_in: the address that a report names; empty: none, the report is passed over.
    """

    def __init__(
        self,
        bus: Bus,
        start: Mapping[Partition, int],
        name: str,
        address_in: Callable[[WorkerReport], str],
    ) -> None:
        self._reader = EventReader(bus, start, name)
        self._address_in = address_in
        self._newest: dict[str, tuple[WorkerReport, float]] = {}  # by worker, with when it was read

    def poll(self) -> None:
        """Read what is new; never waits."""
        for record in self._reader.poll(MAX_POLL):
            report = record.event
            if not isinstance(report, WorkerReport) or not (address := self._address_in(report)):
                continue
            if report.host in ("", host_name()) or not is_loopback(address):
                self._newest[report.worker] = report, time.monotonic()
            else:
                self._newest.pop(report.worker, None)

    def since(self, since_s: float) -> Sequence[WorkerReport]:
        """Those that were read at that time, monotonic, or later."""
        return [report for report, read_s in [*self._newest.values()] if read_s >= since_s]

    def alive(self, silent_s: float) -> Sequence[WorkerReport]:
        """Those of workers that have reported within `silent_s`, and not that they stop; may be
        asked from any thread."""
        found = self.since(time.monotonic() - silent_s)
        return [report for report in found if report.state != "stopped"]

    def close(self) -> None:
        """Release the reader."""
        self._reader.close()
