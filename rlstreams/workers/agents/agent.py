"""The port `Agent`: something that can be started on a task, and how it ended."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How an agent ended by itself."""

    is_failed: bool = False  # by its own code
    detail: str = ""  # what it said last
    report: Report | None = None  # what it returned, if that is a reward


class Agent(Protocol):
    """Its methods run on the engine's event loop."""

    async def run(self, start: Start) -> Ending:
        """Start it, and wait for its end; cancelled, it is ended with all that it started.

        Raises:
            LostAgentError: its process is gone, another start may fare better.
        """

    async def close(self) -> None:
        """End what it keeps running; idempotent."""
