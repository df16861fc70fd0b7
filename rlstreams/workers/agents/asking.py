"""Requests for sessions of agents that run elsewhere, and the JSON that answers them.

A worker's remote agents have runners, its outside ones clients: both ask by `POST /sessions`, with
the agent's key, and find key and address in a file of the run's folder.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from rlstreams.streams.broker.ports import is_free
from rlstreams.streams.synced import write_whole
from rlstreams.workers.agents.agent import Start
from rlstreams.workers.config.agents import AgentSection, GatewaySection
from rlstreams.workers.gateway.keys import Keys
from rlstreams.workers.gateway.port import CallRefusedError, url_of

MAX_ASKING = 1024  # of one agent that wait for a session: each is a connection
BUSY_S = 5.0  # until one that is refused may ask again

Given = asyncio.Future[Mapping[str, Any]]
"""The session that a request waits for, as JSON."""


class AskedAgent(Protocol):
    """An agent whose sessions are asked for."""

    name: str
    file: Path  # with address and key; for the run's owner alone
    url: str  # of the gateway, for those who ask; set before the first session

    @property
    def num_waiting(self) -> int:
        """Sessions that nobody has."""

    @property
    def waits_for(self) -> str:
        """Sessions that wait, in words; "": none does. May be asked from any thread."""

    async def ask(self, wait_s: float, client_group: str) -> Mapping[str, Any] | None:
        """See Desk."""


def refuse_beyond(most: int, num: int, who: str) -> None:
    """Return if one more request may wait for a session.

    Args:
        who: those that wait, in words.

    Raises:
        CallRefusedError: 429; as many as may be wait already.
    """
    if num >= most:
        message = f"{num} {who} wait for a session already"
        raise CallRefusedError(429, "overloaded", message, retry_after_s=BUSY_S)


def start_json(start: Start, section: AgentSection, url: str) -> dict[str, Any]:
    """A start as JSON, for the runner or client that works on it."""
    return {
        "session": start.session_id,
        "agent": section.name,
        "base_url": f"{url}/v1",
        "api_key": start.key,
        "timeout_s": section.timeout_s,
        "lease_s": section.lease_s,
    }


class Runners:
    """The port `Desk`: agents of a worker that run elsewhere, by their keys."""

    def __init__(
        self, agents: Sequence[AskedAgent], keys: Keys, section: GatewaySection, ordinal: int = 0
    ) -> None:
        """
        Args:
            ordinal: of the worker, which has a port of its own.
        """
        self._section = section
        self._agents = {agent.name: agent for agent in agents}
        port = section.port + ordinal if section.port else self._port_before()
        self.door = (section.host, port)
        """Host and port to listen at; port 0: any free one."""
        self.address = ""
        """Where other workers reach this gateway; "": it does not listen yet."""
        self._keys = keys

    def listening(self, port: int) -> None:
        """Publish the address to ask at: in a file for each agent, for its owner alone.

        Args:
            port: at which the door listens.
        """
        self.address = url_of(self._section.host, port)
        configured = self._section.url.replace("{port}", str(port)).rstrip("/")
        url = configured or self.address
        for agent in self._agents.values():
            agent.url = url
            key = self._keys.make_runner(agent.name)
            said = {"url": f"{url}/sessions", "key": key, "port": port}
            write_whole(agent.file, json.dumps(said, indent=2).encode(), is_private=True)

    def _port_before(self) -> int:
        """Port of this worker's last process, if it is free: clients that go on with their key
        know no other address. 0: there is none."""
        for agent in self._agents.values():
            with suppress(OSError, ValueError, LookupError, TypeError):
                port = int(json.loads(agent.file.read_text("utf-8"))["port"])
                if is_free(port, self._section.host):
                    return port
        return 0

    def check(self, key: str) -> None:
        """See Desk."""
        self._agent(key)

    async def ask(
        self, key: str, wait_s: float, client_group: str = ""
    ) -> Mapping[str, Any] | None:
        """See Desk."""
        return await self._agent(key).ask(wait_s, client_group)

    def _agent(self, key: str) -> AskedAgent:
        agent = self._agents.get(self._keys.runner(key))
        if agent is None:
            raise CallRefusedError(
                401, "invalid_api_key", "the key is of an agent that runs in no other place"
            )
        return agent

    @property
    def num_waiting(self) -> int:
        """Sessions that nobody has."""
        return sum(agent.num_waiting for agent in self._agents.values())

    @property
    def waits_for(self) -> str:
        """Sessions that wait, in words; "": none does. May be asked from any thread."""
        return "; ".join(filter(None, (agent.waits_for for agent in self._agents.values())))
