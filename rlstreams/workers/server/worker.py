"""Role `server`: starts one model server, looks at it, and ends with it.

`up`, systemd, Kubernetes or Slurm starts this role again as any other, so one rule of restarts
holds for all. Rollout workers know the server's address alone: one that dies comes back and finds
the server as it was, and reports the state in which it takes the server to be.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from rlstreams.streams.leases import GRANTED, HELD, RECALLED, RELEASED, Lease
from rlstreams.streams.log.bus import Bus, Producer
from rlstreams.streams.log.errors import (
    BrokerError,
    ConfigError,
    DeadlineError,
    OutcomeUnknownError,
    StreamsError,
)
from rlstreams.streams.log.record import Outgoing
from rlstreams.streams.log.topics import WORKER_EVENTS
from rlstreams.streams.workers import SILENT_S
from rlstreams.workers.engines.served.states import State
from rlstreams.workers.loop.context import Context
from rlstreams.workers.loop.lease import AWAITS_SHIFT, OFFLOADED
from rlstreams.workers.loop.pending import commit
from rlstreams.workers.loop.reporter import NewestReports, Reporter
from rlstreams.workers.server.process import (
    PATIENCE_S,
    REFUSED,
    HealthLooks,
    ServerProcess,
    status_of,
)

POLL_S = 0.05
PORT_S = 30.0  # longest wait for another process to leave the server's port
TAKEN_LOOK_S = 1.0  # longest wait for an answer of the process that has it
NEWS_S = 2.0  # by then no report is about the server's predecessor
BROKER_S = 2.0  # between two attempts to report, while the broker does not take it
SLEEP_S = 3.0  # for its worker to say that it sleeps, once it has released the device


class ServerEndedError(StreamsError):
    """The model server ended, or had to be ended: its role ends too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """Limits of waits for a server, and pauses between looks at it. Seconds."""

    start_s: float  # a start
    silent_s: float  # a server that answers no look
    beat_s: float = 1.0  # between two looks
    look_s: float = 4.0  # the answer to a look
    port_s: float = PORT_S


class Users(NewestReports):
    """Rollout workers' reports on one server."""

    def __init__(self, bus: Bus, url: str) -> None:
        self._url = url
        start = bus.ends(WORKER_EVENTS.name)
        super().__init__(
            bus, start, WORKER_EVENTS.name, lambda it: url if url in it.servers else ""
        )

    def takes_for(self, state: State, *, instance: str = "", since_s: float) -> str:
        """The worker that takes the server for `state`; empty: none.

        Args:
            instance: of the process to ask; empty: any.
            since_s: what was read before does not count.
        """
        for report in self.since(since_s):
            if instance in ("", report.instance) and report.servers[self._url] == state:
                return report.worker
        return ""

    def is_used(self) -> bool:
        """Whether a worker that uses the server lives, by the reports."""
        return bool(self.alive(SILENT_S))


class MemoryLease:
    """Whether the server may have memory: always, or while a rollout worker has the device."""

    def __init__(self, *, is_shared: bool) -> None:
        self._is_shared = is_shared
        self.is_ours = not is_shared
        self.number = 0  # of the last shift of a rollout worker
        self.instance = ""  # of that worker
        self.is_released = False  # that lease is over, and the worker said so
        self.over_s = 0.0  # since when it is over; monotonic

    def follow(self, lease: Lease) -> None:
        """Take the newest state of the lease on the device."""
        if not self._is_shared:
            return
        if not lease.holder.startswith("rollout-"):
            self.is_ours = False
            return
        was_ours = self.is_ours or lease.shift != self.number
        self.number, self.instance = lease.shift, lease.instance
        self.is_ours = lease.state in (GRANTED, HELD, RECALLED)
        if was_ours and not self.is_ours:
            self.is_released, self.over_s = lease.ended == RELEASED, time.monotonic()


class ServerWorker:
    """One model server; implements `rlstreams.workers.loop.runtime.Role`.

    consumes:     worker-events (WorkerReport of rollout workers); control (DeviceLease)
    produces:     worker-events
    waits for:    its start: on its GPU, while another server starts there; on a device that roles
                  share, until a rollout worker has it
    unblocked by: that server answering; up granting a shift to rollout

    Raises:
        ServerEndedError: from `tick`: the server died, hangs, or did not start in time.
        ConfigError: from `tick`: another process listens at its address.
    """

    def __init__(
        self,
        context: Context,
        url: str,
        process: ServerProcess,
        looks: HealthLooks,
        patience: Patience,
        *,
        name: str,
        is_shared: bool = False,
    ) -> None:
        """
        Args:
            name: kind and version of the server, for people.
        """
        self._url, self._process, self._looks = url, process, looks
        self._patience = patience
        self._name = name
        self._log = context.log
        self._reporter = Reporter(context)
        self._bus, self._transactional_id = context.bus, context.transactional_id
        self._producer: Producer | None = self._bus.producer(self._transactional_id)
        self._again_s = 0.0  # when the broker is asked again
        self._users = Users(context.bus, url)
        self._lease = MemoryLease(is_shared=is_shared)
        self._began_s = time.monotonic()
        self._ready_s: float | None = None
        self._is_of_use = False
        self._used_by = ""  # the worker's process in whose lease it was started
        self._slept_in = -1  # the lease at whose end it gave its memory up
        self._is_draining = self.is_paused = self.done = False
        self._drain_until_s = 0.0
        self._drain_s = context.config.deadlines.drain_s

    @property
    def is_idle(self) -> bool:
        """Whether nobody uses the server."""
        return not self._users.is_used()

    def follow(self, lease: Lease) -> None:
        """Follow the lease on the device that the server shares."""
        self._lease.follow(lease)

    def tick(self) -> None:
        """Look once, report, and wait a little."""
        self._users.poll()
        if self._is_draining:
            self._leave()
        else:
            self._mind()
        self._say(self._reporter.due())
        time.sleep(POLL_S)

    def drain(self) -> None:
        """End the server, once its users have ended: what they sample they finish first."""
        self._is_draining = True
        self._drain_until_s = time.monotonic() + self._drain_s

    def close(self) -> None:
        """End the server, and release the rest; a drained worker reports its end."""
        self._looks.close()
        self._process.end(PATIENCE_S)
        if self.done:
            self._say(self._reporter.last_report())
        self._users.close()
        if self._producer is not None:
            self._producer.close()

    def _say(self, records: Sequence[Outgoing]) -> None:
        """Commit reports. A broker that cannot be reached is no reason to end a server: a lost
        report is replaced by the next one, a second later."""
        if not records or time.monotonic() < self._again_s:
            return
        try:
            self._producer = self._producer or self._bus.producer(self._transactional_id)
            commit(self._producer, records)
        except (BrokerError, DeadlineError, OutcomeUnknownError) as err:
            self._log.warning("report_lost", why=str(err))
            self._again_s = time.monotonic() + BROKER_S
            if self._producer is not None:
                self._producer.close()
                self._producer = None

    def _leave(self) -> None:
        is_over = not self._users.is_used() or time.monotonic() > self._drain_until_s
        self._reporter.state("draining", "" if is_over else f"{self._url} is still used")
        self.done = is_over

    def _mind(self) -> None:
        child = self._process.child
        if child is None:
            self._begin()
            return
        if (cause := child.cause()) or child.poll() is not None:
            raise self._ended(cause or f"ended with status {child.poll()}")
        if not self._lease.is_ours:
            self._yield_memory()
            return
        if self._used_by != self._lease.instance:
            self._make_way("its worker was started again, and cannot know that it sleeps")
            return
        if self._slept_in >= 0 and not self._process.why_not_yet():  # its worker wakes it
            self._slept_in = -1
            self._process.answered()
        self._look()

    def _begin(self) -> None:
        """Start the server, once it may."""
        if not self._lease.is_ours:
            self._reporter.state(OFFLOADED, AWAITS_SHIFT)
            return
        waited_s = time.monotonic() - self._began_s
        if status_of(self._url, TAKEN_LOOK_S) != REFUSED:
            self._reporter.state("starting", f"another process listens at {self._url}")
            if waited_s > self._patience.port_s:
                raise ConfigError(
                    f"{self._url}: another process listens there for {self._patience.port_s:g} s: "
                    "end it, or set a free port (engine.port, where 0 finds one, or judge.port)"
                )
            return
        if why_not := self._process.why_not_yet():
            self._reporter.state("starting", why_not)
            return
        try:
            self._process.start()
        except OSError as err:
            raise ServerEndedError(f"server {self._url} cannot be started: {err}") from err
        self._used_by, self._began_s, self._ready_s = self._lease.instance, time.monotonic(), None
        self._looks.begin()
        self._log.info("server_started", url=self._url, log=str(self._process.log))
        self._reporter.state("starting", f"{self._name}; its log is {self._process.log}")

    def _look(self) -> None:
        """Check that the server is ready and answers, and that no worker reports that it hangs."""
        now_s, patience = time.monotonic(), self._patience
        if self._ready_s is None:
            if self._looks.is_ready:
                self._ready_s = now_s
                self._process.answered()
                self._reporter.count(server_starts=1)
                took_s = now_s - self._began_s
                self._log.info("server_ready", url=self._url, seconds=round(took_s, 1))
            elif now_s - self._began_s > patience.start_s:
                raise self._ended(f"was not ready within {patience.start_s:g} s (engine.start_s)")
            return
        self._reporter.state(*self._standing())
        if not self._is_of_use and self._serves(self._ready_s + NEWS_S):
            self._is_of_use = True
            self._reporter.count(served=1)
        if now_s - self._looks.answered_s > patience.silent_s:
            why = f"did not answer /health for {patience.silent_s:g} s (engine.silent_s)"
            raise self._ended(why)
        if worker := self._users.takes_for(State.HUNG, since_s=self._ready_s + NEWS_S):
            raise self._ended(f"hangs, says {worker}")

    def _serves(self, since_s: float) -> bool:
        """Whether the server was of use: a worker has said since then that it holds a version. One
        that dies in each first pull is ready each time, and commits nothing."""
        return bool(self._users.takes_for(State.SERVING, since_s=since_s))

    def _standing(self) -> tuple[str, str]:
        """State and detail of a server that is ready, for reports."""
        return "serving", f"{self._name} at {self._url}"

    def _yield_memory(self) -> None:
        """Another role has the device: the server sleeps, as its worker says, or is ended."""
        lease, ready_s = self._lease, self._ready_s
        if self._slept_in == lease.number:
            self._reporter.state(OFFLOADED, AWAITS_SHIFT)
        elif (
            lease.is_released
            and ready_s is not None
            and self._users.takes_for(State.ASLEEP, instance=lease.instance, since_s=ready_s)
        ):
            self._slept_in = lease.number
            self._process.sleeps()
        elif not lease.is_released or ready_s is None or time.monotonic() > lease.over_s + SLEEP_S:
            self._make_way("its shift on the device is over, and nobody says that it sleeps")

    def _make_way(self, why: str) -> None:
        """End the server at once, in good order: it did not fail, and the next shift begins with
        another one."""
        self._log.warning("server_ended", url=self._url, why=why)
        self._process.end()
        self.done = True

    def _ended(self, why: str) -> ServerEndedError:
        lines = [] if self._process.child is None else self._process.child.log_tail()
        tail = "\n  ".join(["", "the last lines of its log:", *lines]) if lines else ""
        return ServerEndedError(f"server {self._url} {why} (log: {self._process.log}){tail}")
