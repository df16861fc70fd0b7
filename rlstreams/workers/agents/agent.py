"""The port `Agent`: a program that can be started on a task, and its end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

from rlstreams.workers.gateway.port import Report

MAX_DETAIL = 2000  # characters of an agent's last words that are kept


class LostAgentError(Exception):
    """The agent's process is gone by no fault of this task: started again, it goes on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplePlace:
    """A sample that is to be worked on."""

    session_id: str
    group_id: str
    group_size: int
    client_group: str = ""  # that had it in an earlier start; see `SessionOpened`
    siblings: Mapping[str, str] = field(default_factory=dict)  # client groups of them, by session


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
    """Seconds for which it has sent nothing and waited for no answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """The end of an agent that ended by itself."""

    is_failed: bool = False  # by its own code
    is_abandoned: bool = False  # nobody goes on with it
    detail: str = ""  # its last words
    report: Report | None = None  # its return value, if that is a reward


async def fell_silent(start: Start, limit_s: float) -> bool:
    """Wait until the agent says that it is done; whether it was silent for `limit_s` s instead."""
    while not start.ended.is_set():
        if (left_s := limit_s - start.silent_s()) <= 0:
            return True
        with suppress(TimeoutError):
            await asyncio.wait_for(start.ended.wait(), left_s)
    return False


class Agent(Protocol):
    """Its methods run on the engine's event loop."""

    async def taken(self, place: SamplePlace) -> str:
        """Wait until a start of this session can be run, which is at once where we start it; return
        the group of the client that has it, "" if it is ours."""

    async def run(self, start: Start) -> Ending:
        """Start it, and wait for its end; cancelled, it is ended with all that it started.

        Raises:
            LostAgentError: its process is gone, another start may fare better.
        """

    async def close(self) -> None:
        """End what it keeps running; idempotent."""
