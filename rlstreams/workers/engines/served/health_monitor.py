"""Health monitor of one server: meets it, looks at it, gives it up, begins again.

A server that died, fell silent or hangs is shut at once and its requests end with an error, so that
they are sent to another one. It comes back without a version: only a pull opens its gate again. Its
owner starts it again: role `server`, or somebody else.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Callable

from rlstreams.workers.engines.served.facts import RouterError, untested
from rlstreams.workers.engines.served.http import ServerError, ServerGoneError
from rlstreams.workers.engines.served.server_client import Liveness, ServerClient
from rlstreams.workers.engines.served.settings import ServedSettings
from rlstreams.workers.engines.served.states import Event, State

_QUICK = 4  # looks per beat at a server that is not up
_COMPILING = 6  # times `silent_s`, before its first answer: it may compile kernels for that


class HealthMonitor:
    """Monitor of one server; `run` is a task of the engine."""

    def __init__(
        self,
        server: ServerClient,
        settings: ServedSettings,
        on_change: Callable[[], None],
        note: Callable[[str], None],
    ) -> None:
        """Args: on_change: called when a gate may have moved."""
        self.server = server
        server.on_loss = self._lost
        self.failure = ""  # reason that it cannot be brought into service
        self.rests = False  # whether it must free its memory, or has done so
        self._settings = settings
        self._on_change = on_change
        self._note = note
        self._now = asyncio.Event()
        self._last_look: Liveness | None = None  # since `rest` was called
        self._silent_since_s: float | None = None
        self._inside_s = 0.0  # when its engine answered last
        self._num_before = 0  # tokens that came before it was met
        self._gauges_s = 0.0  # when its gauges were read last; infinite: it has none

    def look(self) -> None:
        """Look now, without waiting for the next beat."""
        self._now.set()

    async def run(self) -> None:
        """Monitor the server until it is given up, or this task is cancelled."""
        while not self.failure:
            self._now.clear()  # before the look: an event during it causes another one
            await (self._check() if self.server.is_up else self._greet())
            await self._rest()
            pause_s = self._settings.beat_s
            pause_s = pause_s if self.server.is_up else pause_s / _QUICK
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._now.wait(), pause_s)

    @property
    def is_at_rest(self) -> bool:
        """Whether the server holds no memory: it sleeps, or no process listens there."""
        is_up = self.server.is_up
        is_gone = not is_up and (self._last_look is Liveness.REFUSED or bool(self.failure))
        return self.server.state.name is State.ASLEEP or is_gone

    def rest(self) -> None:
        """Have the server free its memory, as soon as it is up."""
        self.rests, self._last_look = True, None
        self.look()

    async def wake(self) -> None:
        """Have the server up again; one that does not wake is given up."""
        try:
            await self.server.wake()
        except ServerError as err:
            self._give_up(f"it did not wake up: {err}")
        self.rests = False
        self.look()

    async def _rest(self) -> None:
        """Put the server to sleep if it must rest, also if it came up just now."""
        state = self.server.state
        if not self.rests or not state.is_up or state.name in (State.ASLEEP, State.PULLING):
            return
        try:
            await self.server.sleep()
        except ServerError as err:
            self._give_up(f"it did not give its memory up: {err}")

    async def _greet(self) -> None:
        server = self.server
        try:
            self._last_look = await server.look(self._settings.look_s)
            if self._last_look is not Liveness.ALIVE:
                if self._last_look is Liveness.REFUSED and server.state.name is State.HUNG:
                    server.state.go(Event.LOST)  # its owner has ended it
                return
            await server.meet()
        except ServerError as err:
            if not isinstance(err, ServerGoneError) and err.status < 500:
                cure = f"; {err.cure}" if isinstance(err, RouterError) else ""
                self._fail(f"{err}{cure}")  # it answers, but is not usable
            elif isinstance(err, ServerGoneError) and await self._still_listens():
                server.lose(f"it listens and does not answer: {err}", hangs=True)
            return  # else the server, or a proxy in front of it, is not ready yet
        self._silent_since_s, self._inside_s, self._gauges_s = None, time.monotonic(), 0.0
        self._num_before = server.requests.num_sampled
        assert server.facts is not None
        way = f"weights reach it by {server.delivery_name}"
        why = untested(server.facts.kind, server.facts.version)
        what = f"{server.facts.name}, {why}" if why else server.facts.name
        self._note(f"server {server.url} is {what}; {way}")
        self._on_change()

    async def _still_listens(self) -> bool:
        """Whether a silent server still listens; a dead one need not be ended."""
        return await self.server.look(self._settings.look_s) is Liveness.ALIVE

    async def _check(self) -> None:
        settings = self._settings
        found = await self.server.look(min(settings.answer_s, settings.look_s))
        if found is Liveness.ALIVE:
            self._silent_since_s = None
            await self._read_gauges()
            self._on_change()  # the gate may have been shut and opened while it was looked at
            await self._check_inside()
            return
        if not self.server.is_up:
            return  # lost meanwhile
        now_s = time.monotonic()
        self._silent_since_s = self._silent_since_s or now_s
        # The owner of a server may restart it sooner than `silent_s`.
        if found is not Liveness.REFUSED and now_s - self._silent_since_s < settings.silent_s:
            self._now.set()  # again at once: a dead server may be restarted between two looks
            await asyncio.sleep(settings.beat_s / 10)
            return
        silent_s, self._silent_since_s = now_s - self._silent_since_s, None
        why = f"did not answer /health for {silent_s:.1f} s"
        if found is Liveness.REFUSED:
            self.server.lose(why)
        else:
            self._give_up(why)

    async def _read_gauges(self) -> None:
        """Read the gauges now and then, while the server samples; ignores silence."""
        server, adapter, now_s = self.server, self.server.adapter, time.monotonic()
        if not server.state.is_open or now_s < self._gauges_s + self._settings.gauges_s:
            return
        assert adapter is not None
        self._gauges_s = now_s
        try:
            gauges = await adapter.gauges(self._settings.look_s)
        except ServerGoneError:
            return
        except ServerError as err:
            self._gauges_s = math.inf
            return self._note(f"{err}; the limit follows its answers alone")
        if server.state.is_open and server.adapter is adapter:
            server.requests.capacity.look(gauges, len(server.requests))

    async def _check_inside(self) -> None:
        """Check now and then that the engine behind the front end answers. A pull has a deadline of
        its own, and an engine that sleeps cannot answer."""
        server, now_s = self.server, time.monotonic()
        state = server.state.name
        if (
            state in (State.PULLING, State.ASLEEP)
            or now_s < self._inside_s + self._settings.inside_s
        ):
            return
        silent_s = self._settings.silent_s
        if server.requests.num_sampled == self._num_before:
            silent_s *= _COMPILING
        if not server.is_up or await server.look_inside(silent_s):
            self._inside_s = time.monotonic()
        elif server.is_up and server.state.name is not State.PULLING:  # no pull has begun since
            self._give_up(f"answers /health, and its engine did not answer for {silent_s:g} s")

    def _give_up(self, why: str) -> None:
        self.server.lose(why, hangs=True)

    def _lost(self, why: str) -> None:
        self._note(f"server {self.server.url} is out of service: {why}")
        self._on_change()

    def _fail(self, why: str) -> None:
        self.failure = f"server {self.server.url}: {why}"
        self.server.lose(self.failure)
