"""An agent that is started elsewhere: its sessions wait for runners, its runners for sessions.

A runner is any program, anywhere, that asks with the agent's runner key. The first to ask is given
the session that waits longest, as one start of the agent, and works on it by that start's own key.
A runner that is silent for `lease_s` loses it: the session waits again, its next start is another
runner's, and goes on from the log. Runners are known by their requests alone.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlstreams.streams.log.text import counted
from rlstreams.workers.agents.agent import Ending, LostAgentError, SamplePlace, Start, fell_silent
from rlstreams.workers.agents.asking import MAX_ASKING, Given, refuse_beyond, start_json
from rlstreams.workers.config.agents import AgentSection
from rlstreams.workers.gateway.port import CallRefusedError, ending

FILE = "runner.json"  # the runners' address and key; for the run's owner alone


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A session that nobody works on."""

    since_s: float  # monotonic
    found: asyncio.Future[Given]  # its runner


class RemoteAgent:
    """The port `Agent`."""

    def __init__(
        self, section: AgentSection, folder: Path, *, max_asking: int = MAX_ASKING
    ) -> None:
        """
        Args:
            folder: of the file with the runners' address and key.
        """
        self.name = section.name
        self.file = folder / FILE
        self.url = ""  # where its runners find the gateway; set before the first session
        self._section = section
        self._max_asking = max_asking
        self._sessions: dict[str, _Waiting] = {}  # by id, the one that waits longest first
        self._runners: deque[Given] = deque()  # the one that asked first first
        self._found: dict[str, Given] = {}  # of sessions that are about to start
        self._is_closed = False

    @property
    def num_waiting(self) -> int:
        """Sessions that no runner has."""
        return len(self._sessions)

    @property
    def waits_for(self) -> str:
        """Sessions that wait, in words; "": none does. May be asked from any thread."""
        waiting = list(self._sessions.values())
        if not waiting:
            return ""
        waits_s = time.monotonic() - min(one.since_s for one in waiting)
        sessions = counted(len(waiting), "session")
        return (
            f"for a runner of agent {self.name!r}: {sessions}, the oldest for {waits_s:.0f} s; "
            f"runners read in {self.file} where to ask"
        )

    async def taken(self, place: SamplePlace) -> str:
        """See Agent; waits until a runner asks."""
        session_id = place.session_id
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
        return ""

    async def run(self, start: Start) -> Ending:
        """See Agent.

        Raises:
            LostAgentError: its runner hung up before it had the session, or is silent.
        """
        asking = self._found.pop(start.session_id)
        if asking.done():
            raise LostAgentError("its runner hung up before it was given the session")
        asking.set_result({**start_json(start, self._section, self.url), "task": start.task})
        if await fell_silent(start, lease_s := self._section.lease_s):
            raise LostAgentError(f"its runner was silent for {lease_s:g} s (agent.lease_s)")
        return Ending()

    async def ask(self, wait_s: float, client_group: str = "") -> Mapping[str, Any] | None:
        """See Desk."""
        if self._is_closed:
            raise ending()
        if client_group:
            raise CallRefusedError(
                400,
                "invalid_value",
                f"group is {client_group!r:.60}, but agent {self.name!r} is remote: the run says "
                "which of its sessions are compared",
                param="group",
            )
        refuse_beyond(self._max_asking, len(self._runners), f"runners of agent {self.name!r}")
        asking: Given = asyncio.get_running_loop().create_future()
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
        """Refuse requests: this worker ends, and its sessions go on in the next one."""
        self._is_closed = True
        for asking in (*self._runners, *self._found.values()):
            if not asking.done():
                asking.set_exception(ending())
