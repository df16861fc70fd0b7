"""vLLM and SGLang behind the `Engine` port: several servers, one queue.

Requests wait here, not in the servers: in order, until a server's gate is open and it has room.
Only servers that hold the newest version of all are given new requests, so no request starts under
an older version than the newest that was in service.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import replace

from rlstreams.schemas.events import NO_VERSION, PolicyPublished, ServerLoad
from rlstreams.workers.engines.base import (
    FinishReason,
    GeneratedSegment,
    Held,
    SampleRequest,
    check_request,
)
from rlstreams.workers.engines.served.answer import empty_segment
from rlstreams.workers.engines.served.capacity import Candidate, choose
from rlstreams.workers.engines.served.health_monitor import HealthMonitor
from rlstreams.workers.engines.served.http import ServerError, ServerGoneError
from rlstreams.workers.engines.served.running import room
from rlstreams.workers.engines.served.server_client import ServerClient
from rlstreams.workers.engines.served.settings import ServedSettings
from rlstreams.workers.engines.served.shape import ModelShape
from rlstreams.workers.engines.served.states import State
from rlstreams.workers.model.base import EngineError
from rlstreams.workers.weights.channel import Pulled, WeightChannel, WeightError

_POLL_S = 0.02
_SESSIONS = 65_536  # sessions whose server is remembered: more than are ever open at once


class ServedEngine:
    """Samples on model servers."""

    def __init__(
        self,
        settings: ServedSettings,
        shape: ModelShape,
        max_tokens: int,
        servers: Sequence[ServerClient],
        note: Callable[[str], None] = lambda _: None,
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        """Nothing is started before `start`.

        Args:
            max_tokens: of the model; a server may serve less.
            note: logs a message about servers.
            on_close: releases the resources that the servers' deliveries share.
        """
        self._settings = settings
        self.vocab_size = shape.vocab_size
        self._longest = max_tokens
        self._monitors = [HealthMonitor(s, settings, self.dispatch, note) for s in servers]
        self._on_close = on_close
        self._floor = NO_VERSION  # the newest version that was ever in service
        self._queue = asyncio.Lock()  # its holder is the next request to be given a server
        self._moved = asyncio.Event()  # a gate or a request, since the holder looked
        self._num_waiting = 0
        self._sessions: dict[str, str] = {}  # the address that each session was given last
        self._tasks: list[asyncio.Task[None]] = []
        self._pulls: dict[ServerClient, asyncio.Task[Pulled]] = {}
        self._is_closed = False

    @property
    def capacity(self) -> int:
        """Limits of all servers together, also of those that are down: they come back."""
        return sum(server.requests.capacity.limit for server in self._servers)

    @property
    def max_capacity(self) -> int:
        """Upper bound of `capacity`: every server at its bound."""
        return self._settings.limit * len(self._monitors)

    @property
    def name(self) -> str:
        """Name and version, as `vllm/0.32.0`; without a version while no server was met."""
        names = [server.facts.name for server in self._servers if server.facts]
        return ", ".join(sorted(set(names))) or str(self._settings.kind)

    @property
    def max_tokens(self) -> int:
        """Longest sequence of the server that serves the least."""
        served = [server.facts.max_tokens for server in self._servers if server.facts]
        return min([self._longest, *served])

    @property
    def policy_version(self) -> int:
        """The newest version held by a server that is not pulling, or NO_VERSION."""
        holding = (State.SERVING, State.DOUBTED)
        held = [s.held.policy_version for s in self._servers if s.held and s.state.name in holding]
        newest = max(held, default=NO_VERSION)
        return newest if newest >= self._floor else NO_VERSION

    @property
    def is_up(self) -> bool:
        """Whether a server is up; raises as `wants`."""
        self._check_any_left()
        return any(server.is_up for server in self._servers)

    @property
    def is_ready(self) -> bool:
        """Whether a server is in service, or is being brought back into it."""
        any_left = any(not monitor.failure for monitor in self._monitors)
        return not self._is_closed and self._floor != NO_VERSION and any_left

    @property
    def num_sampled(self) -> int:
        """Tokens received; requests that broke off count none."""
        return sum(server.requests.num_sampled for server in self._servers)

    def wants(self, published: PolicyPublished) -> bool:
        """Whether some server that could pull `published` now holds neither it nor a newer version.

        Raises:
            EngineError: no server can be brought into service any more; gives the reasons.
        """
        self._check_any_left()
        return bool(self._behind(published))

    @property
    def trouble(self) -> str:
        """Servers that fell out of service, each with the reason."""
        troubles = {server.url: server.state.trouble for server in self._servers}
        return "; ".join(f"server {url}: {trouble}" for url, trouble in troubles.items() if trouble)

    @property
    def servers(self) -> Mapping[str, str]:
        """The state of each server by its address."""
        return {server.url: str(server.state) for server in self._servers}

    @property
    def server_loads(self) -> Sequence[ServerLoad]:
        """Load of each server."""
        return [server.load for server in self._servers]

    async def start(self) -> None:
        """Start the servers' monitors; returns at once."""
        self._tasks = [asyncio.create_task(monitor.run()) for monitor in self._monitors]

    async def generate(self, request: SampleRequest) -> AsyncIterator[GeneratedSegment]:
        """The sample's segments; see `Engine.generate`."""
        check_request(request, self.vocab_size, self.max_tokens)
        if self._is_closed:
            raise EngineError(f"{self.name} is closed")
        server = await self._next_server(request)  # sent at once
        if server is None:
            held = [server.held for server in self._servers if server.held]
            newest = max(held, key=lambda one: one.policy_version, default=Held())
            yield empty_segment(newest, FinishReason.ABORT)
            return
        if room(request, self.max_tokens) < 1:  # resumed with nothing left to sample
            yield empty_segment(server.held or Held(), FinishReason.LENGTH)
            return
        try:
            segments = await server.ask(request)
        except ServerError as err:
            if isinstance(err, ServerGoneError):
                server.doubt()
                self._monitor_of(server).look()
            raise
        finally:
            self.dispatch()
        for segment in segments:
            yield replace(segment, server=server.url)

    async def pull(self, published: PolicyPublished, channel: WeightChannel) -> Pulled:
        """Have every server that is up pull the version, side by side.

        Returns when one has it and the others had as long again: a slower server goes on by itself.

        Raises:
            WeightError: no server took it; gives the reason, or the state, of each.
            EngineError: no server came up.
        """
        started_s = time.monotonic()
        await self._one_up()
        mine = {s: self._begin_pull(s, published, channel) for s in self._behind(published)}
        if not mine:  # lost, or laid to rest, since it was wanted
            states = ", ".join(f"{url} is {state}" for url, state in self.servers.items())
            version = published.policy_version
            raise WeightError(f"policy version {version}: no server can take it now: {states}")
        good = await _first_and_near(set(mine.values()), started_s)
        if not good:
            raise WeightError("; ".join(str(task.exception()) for task in mine.values()))
        return Pulled(
            policy_version=published.policy_version,
            weight_hash=published.weight_hash,
            num_bytes=sum(pulled.num_bytes for pulled in good),
            seconds=time.monotonic() - started_s,
            paused_s=max(pulled.paused_s for pulled in good),
            verified=good[0].verified,
        )

    async def sleep(self) -> None:
        """Have every server free its memory, once it is up; none is started meanwhile.

        Raises:
            EngineError: a server still has its memory long after.
        """
        await asyncio.gather(*self._pulls.values(), return_exceptions=True)
        for monitor in self._monitors:
            monitor.rest()
        until_s = time.monotonic() + self._settings.start_s + self._settings.change_s
        while awake := [m.server.url for m in self._monitors if not m.is_at_rest]:
            if time.monotonic() > until_s:
                raise EngineError(f"servers {', '.join(awake)} did not give their memory up")
            await asyncio.sleep(_POLL_S)

    async def wake(self) -> None:
        """Bring every server up again; each holds no version until it has pulled."""
        await asyncio.gather(*(monitor.wake() for monitor in self._monitors))
        self.dispatch()

    async def close(self) -> None:
        """End requests and pulls; idempotent."""
        self._is_closed = True
        tasks = [*self._tasks, *self._pulls.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._tasks = []
        self.dispatch()
        await asyncio.gather(*(server.close() for server in self._servers))
        self._on_close()

    def dispatch(self) -> None:
        """Have waiting requests look again: a gate may have moved, or a place be free."""
        self._floor = max(self._floor, self.policy_version)
        self._moved.set()

    @property
    def _servers(self) -> list[ServerClient]:
        return [monitor.server for monitor in self._monitors]

    @property
    def _at_work(self) -> list[ServerClient]:
        """Servers that are not to rest."""
        return [monitor.server for monitor in self._monitors if not monitor.rests]

    def _monitor_of(self, server: ServerClient) -> HealthMonitor:
        return next(monitor for monitor in self._monitors if monitor.server is server)

    async def _next_server(self, request: SampleRequest) -> ServerClient | None:
        """A server that may be asked now, first come first served; None: the engine is closed."""
        self._num_waiting += 1
        try:
            async with self._queue:  # fair: first in, first out
                while not self._is_closed:
                    if server := self._free_server(request):
                        self._remember(request.session, server)
                        return server
                    self._moved.clear()
                    await self._moved.wait()
                return None
        finally:
            self._num_waiting -= 1

    def _remember(self, session: str, server: ServerClient) -> None:
        if not session:
            return
        self._sessions.pop(session, None)
        self._sessions[session] = server.url  # the newest is the last
        if len(self._sessions) > _SESSIONS:
            del self._sessions[next(iter(self._sessions))]

    def _free_server(self, request: SampleRequest) -> ServerClient | None:
        able = {
            server.url: server
            for server in self._at_work
            if server.state.is_open and server.held and server.held.policy_version >= self._floor
        }
        candidates = {
            url: Candidate(len(server.requests), server.requests.capacity.limit)
            for url, server in able.items()
        }
        url = choose(request.group_id, candidates, self._sessions.get(request.session, ""))
        return able[url] if url else None

    def _check_any_left(self) -> None:
        """Raise an EngineError, with reasons, if no server can be brought into service any more."""
        for task in self._tasks:
            if task.done() and not task.cancelled() and (error := task.exception()) is not None:
                raise EngineError(f"the monitor of a server failed: {error!r}") from error
        failures = [monitor.failure for monitor in self._monitors if monitor.failure]
        if len(failures) == len(self._monitors):
            raise EngineError("\n".join(failures))

    async def _one_up(self) -> None:
        until_s = time.monotonic() + self._settings.start_s
        while not self.is_up:
            if time.monotonic() > until_s:
                urls = ", ".join(server.url for server in self._servers)
                raise EngineError(f"none of {urls} was up within {self._settings.start_s:g} s")
            await asyncio.sleep(_POLL_S)

    def _begin_pull(
        self, server: ServerClient, published: PolicyPublished, channel: WeightChannel
    ) -> asyncio.Task[Pulled]:
        task = asyncio.create_task(server.pull(published, channel))
        self._pulls[server] = task

        def end(ended: asyncio.Task[Pulled]) -> None:
            del self._pulls[server]
            if not ended.cancelled() and ended.exception() is not None:
                self._monitor_of(server).look()
            self.dispatch()

        task.add_done_callback(end)
        return task

    def _behind(self, published: PolicyPublished) -> list[ServerClient]:
        """Servers that a pull would bring forward: also those that hold another version of the same
        number, which a replaced trainer announced in vain."""
        wanted = Held(published.policy_version, published.weight_hash)
        return [
            server
            for server in self._at_work
            if server.state.may_pull
            and server not in self._pulls
            and (server.held is None or server.held.policy_version <= wanted.policy_version)
            and server.held != wanted
        ]


async def _first_and_near(tasks: set[asyncio.Task[Pulled]], started_s: float) -> list[Pulled]:
    """Pulls that succeeded: the first, and those that end within as long again."""
    pending, good = tasks, list[Pulled]()
    while pending and not good:
        done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        good = [task.result() for task in done if not task.exception()]
    if good and pending:
        done, _ = await asyncio.wait(pending, timeout=time.monotonic() - started_s)
        good += [task.result() for task in done if not task.exception()]
    return good
