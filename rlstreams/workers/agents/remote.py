"""An agent that somebody else starts: its sessions wait for runners, its runners for sessions.

A runner is any program, anywhere, that asks with the agent's runner key. Who asks first is given
the session that waits longest, as one start of the agent, and works on it by that start's own key.
A runner that is silent for `lease_s` loses it: the session waits again, its next start is another
runner's, and goes on from the log. Nothing of ours knows of runners but the requests they send.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlstreams.workers.agents.agent import Ending, LostAgentError, Start
from rlstreams.workers.config.agents import AgentSection, GatewaySection
from rlstreams.workers.gateway.keys import Keys
from rlstreams.workers.gateway.port import CallRefusedError, url_of

FILE = "runner.json"  # where a runner asks, and with which key; for the run's owner alone
MAX_RUNNERS = 1024  # of one agent that wait for a session: each is a connection
BUSY_S = 5.0  # until a runner that is refused may ask again

_Asking = asyncio.Future[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A session that nobody works on."""

    since_s: float  # monotonic
    found: asyncio.Future[_Asking]  # its runner


class RemoteAgent:
    """The port `Agent`."""

    def __init__(
        self, section: AgentSection, folder: Path, *, max_runners: int = MAX_RUNNERS
    ) -> None:
        """
        Args:
            folder: of the file that tells runners where they ask.
        """
        self.name = section.name
        self.file = folder / FILE
        self.url = ""  # where its runners find the gateway; set before the first session
        self._section = section
        self._max_runners = max_runners
        self._sessions: dict[str, _Waiting] = {}  # by id, the one that waits longest first
        self._runners: deque[_Asking] = deque()  # the one that asked first first
        self._found: dict[str, _Asking] = {}  # of sessions that are about to start
        self._is_closed = False

    @property
    def num_waiting(self) -> int:
        """Sessions that no runner has."""
        return len(self._sessions)

    @property
    def waits_for(self) -> str:
        """In words; "": no session waits. May be asked from any thread."""
        waiting = list(self._sessions.values())
        if not waiting:
            return ""
        waits_s = time.monotonic() - min(one.since_s for one in waiting)
        sessions = f"{len(waiting)} session{'s' if len(waiting) > 1 else ''}"
        return (
            f"for a runner of agent {self.name!r}: {sessions}, the oldest for {waits_s:.0f} s; "
            f"runners read in {self.file} where to ask"
        )

    async def taken(self, session_id: str) -> None:
        """See Agent; as long as nobody asks."""
        waiting = _Waiting(time.monotonic(), asyncio.get_running_loop().create_future())
        self._sessions[session_id] = waiting
        self._match()
        try:
            self._found[session_id] = await waiting.found
        except asyncio.CancelledError:
            if not waiting.found.cancelled():  # its runner goes to the next session
                self._runners.appendleft(waiting.found.result())
                self._match()
            raise
        finally:
            self._sessions.pop(session_id, None)

    async def run(self, start: Start) -> Ending:
        """See Agent.

        Raises:
            LostAgentError: its runner hung up before it had the session, or is silent.
        """
        asking = self._found.pop(start.session_id)
        if asking.done():
            raise LostAgentError("its runner hung up before it was given the session")
        asking.set_result(self._given(start))
        lease_s = self._section.lease_s
        while not start.ended.is_set():
            left_s = lease_s - start.silent_s()
            if left_s <= 0:
                raise LostAgentError(f"its runner was silent for {lease_s:g} s (agent.lease_s)")
            with suppress(TimeoutError):
                await asyncio.wait_for(start.ended.wait(), left_s)
        return Ending()

    def _given(self, start: Start) -> Mapping[str, Any]:
        """What a runner is told of a start."""
        return {
            "session": start.session_id,
            "agent": self.name,
            "base_url": f"{self.url}/v1",
            "api_key": start.key,
            "timeout_s": self._section.timeout_s,
            "lease_s": self._section.lease_s,
            "task": start.task,
        }

    async def ask(self, wait_s: float) -> Mapping[str, Any] | None:
        """See Desk."""
        if self._is_closed:
            raise _ends()
        if len(self._runners) >= self._max_runners:
            raise CallRefusedError(
                429,
                "overloaded",
                f"{len(self._runners)} runners of agent {self.name!r} wait for a session already",
                retry_after_s=BUSY_S,
            )
        asking: _Asking = asyncio.get_running_loop().create_future()
        self._runners.append(asking)
        self._match()
        try:
            await asyncio.wait({asking}, timeout=wait_s)
            return asking.result() if asking.done() else None
        finally:
            asking.cancel()
            with suppress(ValueError):
                self._runners.remove(asking)

    def _match(self) -> None:
        """Give the sessions that wait longest to the runners that asked first."""
        while self._sessions and self._runners:
            name = next(iter(self._sessions))
            if self._sessions[name].found.done():  # given up
                del self._sessions[name]
                continue
            asking = self._runners.popleft()
            if not asking.done():
                self._sessions.pop(name).found.set_result(asking)

    async def close(self) -> None:
        """Refuse who asks: this worker ends, and its sessions go on in the next one."""
        self._is_closed = True
        for asking in (*self._runners, *self._found.values()):
            if not asking.done():
                asking.set_exception(_ends())


def _ends() -> CallRefusedError:
    return CallRefusedError(
        503, "ending", "this worker ends; its sessions go on elsewhere", retry_after_s=BUSY_S
    )


class Runners:
    """The port `Desk`: the remote agents of a worker, by their keys."""

    def __init__(
        self, agents: Sequence[RemoteAgent], keys: Keys, section: GatewaySection, ordinal: int = 0
    ) -> None:
        """
        Args:
            ordinal: of the worker, which has a port of its own.
        """
        self.door = (section.host, section.port and section.port + ordinal)
        """Host and port to listen at; port 0: any free one."""
        self._section = section
        self._agents = {agent.name: agent for agent in agents}
        self._keys = keys

    def listening(self, port: int) -> None:
        """Tell runners where they ask: by a file for each agent, for its owner alone.

        Args:
            port: at which the door listens.
        """
        told = self._section.url.replace("{port}", str(port)).rstrip("/")
        url = told or url_of(self._section.host, port)
        for agent in self._agents.values():
            agent.url = url
            said = {"url": f"{url}/sessions", "key": self._keys.make_runner(agent.name)}
            agent.file.parent.mkdir(parents=True, exist_ok=True)
            beside = agent.file.with_suffix(".tmp")
            beside.unlink(missing_ok=True)
            descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                json.dump(said, file, indent=2)
            beside.replace(agent.file)

    def check(self, key: str) -> None:
        """See Desk."""
        self._agent(key)

    async def ask(self, key: str, wait_s: float) -> Mapping[str, Any] | None:
        """See Desk."""
        return await self._agent(key).ask(wait_s)

    def _agent(self, key: str) -> RemoteAgent:
        agent = self._agents.get(self._keys.runner(key))
        if agent is None:
            raise CallRefusedError(
                401, "invalid_api_key", "the key is of an agent that is not remote in this run"
            )
        return agent

    @property
    def num_waiting(self) -> int:
        """Sessions that no runner has."""
        return sum(agent.num_waiting for agent in self._agents.values())

    @property
    def waits_for(self) -> str:
        """In words; "": no session waits. May be asked from any thread."""
        return "; ".join(filter(None, (agent.waits_for for agent in self._agents.values())))
