"""Health monitor of one server: starts it, meets it, looks at it, gives it up, begins again.

A server that died, fell silent or hangs in a pull is shut at once and its requests end with an
error, so that they are asked elsewhere. It comes back at no version: only a pull opens its gate
again. One of ours is spoken to only while its process runs: what listens at its address else is
somebody else's.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable

from rlstreams.workers.engines.served.http import REFUSED, ServerError, ServerGoneError
from rlstreams.workers.engines.served.process import ServerProcess
from rlstreams.workers.engines.served.server import Server
from rlstreams.workers.engines.served.settings import ServedSettings

MAX_FAILED_STARTS = 3


class HealthMonitor:
    """Looks after one server; `run` is a task of the engine."""

    def __init__(
        self,
        server: Server,
        settings: ServedSettings,
        process: ServerProcess | None,
        on_change: Callable[[], None],
        note: Callable[[str], None],
    ) -> None:
        """Args: process: None: somebody else runs the server. on_change: a gate may have moved."""
        self.server = server
        self.failure = ""  # it cannot be brought into service; says why
        self._settings = settings
        self._process = process
        self._on_change = on_change
        self._note = note
        self._look = asyncio.Event()
        self._silent_since_s: float | None = None
        self._taken_since_s: float | None = None  # while another process has its port

    def look(self) -> None:
        """Look now: something was seen."""
        self._look.set()

    async def run(self) -> None:
        """Until the server is given up, or cancelled."""
        while not self.failure:
            self._look.clear()  # before the look: what is seen during it is looked at again
            if self._process is not None:
                await self._mind(self._process)
            if not self.failure and (self._process is None or self._process.is_serving):
                await (self._check() if self.server.is_up else self._greet())
                await self._rest()
            pause_s = self._settings.beat_s if self.server.is_up else self._settings.beat_s / 4
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._look.wait(), pause_s)

    @property
    def is_at_rest(self) -> bool:
        """Whether the server has no memory: it sleeps, or is not there."""
        is_gone = self.server.is_gone if self._process is None else not self._process.is_running
        return self.server.is_asleep or is_gone

    async def _rest(self) -> None:
        """Put it to sleep, if it is to rest; also one that came up just now."""
        if self.server.is_resting and self.server.is_up and not self.server.is_asleep:
            try:
                await self.server.sleep()
            except ServerError as err:
                self._give_up(f"it did not give its memory up: {err}")

    async def wake(self) -> None:
        """Have it up again; one that does not wake is given up."""
        try:
            await self.server.wake()
        except ServerError as err:
            self.server.is_resting = False
            self._give_up(f"it did not wake up: {err}")
        self.look()

    def close(self) -> None:
        """End the server if it is ours."""
        if self._process is not None:
            self._process.close()

    async def _mind(self, process: ServerProcess) -> None:
        """Start it, or note that it ended."""
        if self.server.held is not None:
            process.in_service()
        if why := process.ended():
            before = self.server.trouble  # what we ended it for, or what its pull saw of its end
            self._lose(f"{before}; {why}" if before else why)
            if process.num_failures >= MAX_FAILED_STARTS:
                self._fail(f"{process.num_failures} starts failed; the last time {why}")
        may_start = process.may_start and not self.failure and not self.server.is_resting
        if may_start and not await self._is_taken() and not self.server.is_resting:
            before = process.waits_for
            if process.take_turn():
                process.start()
                self._note(f"server {self.server.url} is being started; log: {process.log}")
            elif process.waits_for != before:
                self._note(f"server {self.server.url} waits: {process.waits_for}")

    async def _is_taken(self) -> bool:
        """Whether somebody listens at the server's address, who would be taken for it.

        The end of its predecessor is waited for.
        """
        if await self.server.http.status_of("/health", self._settings.look_s) == REFUSED:
            self._taken_since_s = None
            return False
        now_s, port_s = time.monotonic(), self._settings.port_s
        if self._taken_since_s is None:
            self._taken_since_s = now_s
            self._note(f"server {self.server.url}: another process listens there; waiting")
        elif now_s - self._taken_since_s > port_s:
            self._fail(
                f"another process listens there for {port_s:g} s: end it, or set engine.port to a "
                "port that is free, or to 0"
            )
        return True

    async def _greet(self) -> None:
        server, process = self.server, self._process
        is_inherited = process is not None and process.is_inherited
        try:
            if await server.is_alive(self._settings.look_s):
                await server.meet(is_inherited=is_inherited)
                if process is not None:
                    process.met()
                self._silent_since_s = None
                assert server.facts is not None
                way = f"weights reach it by {server.delivery_name}"
                adopted = "adopted from its last worker, " if is_inherited else ""
                self._note(f"server {server.url} is {adopted}{server.facts.name}; {way}")
                self._on_change()
                return
            why_not = "GET /health is not answered with 200 or 503"
        except ServerError as err:
            why_not = str(err)
            if is_inherited:
                self._give_up(f"not adopted from its last worker: {why_not}")
                return
            if not isinstance(err, ServerGoneError) and err.status < 500:
                self._fail(why_not)  # it answers, and is not what was asked for
                return  # else it, or a proxy in front of it, is not ready yet
        if process is None:
            return
        if is_inherited and not self._may_yet_answer(process):
            self._give_up(f"not adopted from its last worker: {process.waits_for or why_not}")
        elif process.starting_s > self._settings.start_s:
            self._fail(f"not ready within {self._settings.start_s:g} s: {why_not}")

    def _may_yet_answer(self, process: ServerProcess) -> bool:
        """Whether an inherited server is waited for: it starts, while its port is closed, and no
        other one began to start on its GPU; or it has not been silent for long."""
        if self.server.is_gone:
            return process.take_turn()
        return process.starting_s <= self._settings.silent_s

    async def _check(self) -> None:
        if self.server.hang:
            ours = self._process is not None
            cure = "it is started again" if ours else "it stays shut until it answers: restart it"
            self._give_up(f"{self.server.hang}; {cure}")
            return
        if await self.server.is_alive(min(self._settings.answer_s, self._settings.look_s)):
            self._silent_since_s = None
            self._on_change()  # the gate may have been shut and opened while it was looked at
            return
        now_s = time.monotonic()
        self._silent_since_s = self._silent_since_s or now_s
        is_gone = self._process is not None and not self._process.is_running
        # Whoever restarts a server of somebody else's may be quicker than `silent_s`.
        is_gone = is_gone or self.server.is_gone
        if not is_gone and now_s - self._silent_since_s < self._settings.silent_s:
            self._look.set()  # again at once: between two looks a dead one answers nobody
            await asyncio.sleep(self._settings.beat_s / 10)
            return
        self._give_up(f"did not answer /health for {now_s - self._silent_since_s:.1f} s")

    def _give_up(self, why: str) -> None:
        self._lose(why)
        if self._process is not None:
            self._process.kill()

    def _lose(self, why: str) -> None:
        self._note(f"server {self.server.url} is out of service: {why}")
        self.server.lose(why)
        self._on_change()

    def _fail(self, why: str) -> None:
        tail = [] if self._process is None else self._process.log_tail()
        log = "\n  ".join(["; the last lines of its log:", *tail]) if tail else ""
        self.failure = f"server {self.server.url}: {why}{log}"
        self.server.lose(self.failure)
        self.close()
        self._on_change()
