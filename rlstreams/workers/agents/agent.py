"""The port `Agent`: something that can be started on a task, and how it ended."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

from rlstreams.workers.gateway.port import Report

MAX_DETAIL = 2000  # characters of an agent's last words that are kept


class LostAgentError(Exception):
    """Its process is gone by no fault of this task: started again, it goes on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A sample that is to be worked on."""

    session_id: str
    group_id: str
    group_size: int
    client_group: str = ""  # whose it was in an earlier start; see `SessionOpened`
    siblings: Mapping[str, str] = field(default_factory=dict)  # the same of its group, by session


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
    is_abandoned: bool = False  # nobody goes on with it
    detail: str = ""  # what it said last
    report: Report | None = None  # what it returned, if that is a reward


async def fell_silent(start: Start, limit_s: float) -> bool:
    """Return once its agent said that it is done: False; or nothing for `limit_s` seconds: True."""
    while not start.ended.is_set():
        if (left_s := limit_s - start.silent_s()) <= 0:
            return True
        with suppress(TimeoutError):
            await asyncio.wait_for(start.ended.wait(), left_s)
    return False


class Agent(Protocol):
    """Its methods run on the engine's event loop."""

    async def taken(self, place: Place) -> str:
        """Return once a start of this session can be run: where we start it, at once; and the
        group of the client that has it, "" if it is ours."""

    async def run(self, start: Start) -> Ending:
        """Start it, and wait for its end; cancelled, it is ended with all that it started.

        Raises:
            LostAgentError: its process is gone, another start may fare better.
        """

    async def close(self) -> None:
        """End what it keeps running; idempotent."""
