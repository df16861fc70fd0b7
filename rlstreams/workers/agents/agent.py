"""The port `Agent`: something that can be started on a task, and how it ended."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from rlstreams.workers.gateway.port import Report

MAX_DETAIL = 2000  # characters of an agent's last words that are kept


class LostAgentError(Exception):
    """Its process is gone by no fault of this task: started again, it goes on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """One start of an agent."""

    session_id: str
    task: Mapping[str, Any]  # JSON
    url: str  # of the gateway, without a path
    key: str
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once the agent said that it is done."""
    silent_s: Callable[[], float] = lambda: 0.0
    """For how long it has sent nothing and waited for no answer, seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How an agent ended by itself."""

    is_failed: bool = False  # by its own code
    detail: str = ""  # what it said last
    report: Report | None = None  # what it returned, if that is a reward


class Agent(Protocol):
    """Its methods run on the engine's event loop."""

    async def taken(self, session_id: str) -> None:
        """Return once a start of this session can be run here: where we start it, at once."""

    async def run(self, start: Start) -> Ending:
        """Start it, and wait for its end; cancelled, it is ended with all that it started.

        Raises:
            LostAgentError: its process is gone, another start may fare better.
        """

    async def close(self) -> None:
        """End what it keeps running; idempotent."""
