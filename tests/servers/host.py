"""What the routes of a stand-in need of the server that they are on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeAlias

from aiohttp import web

from tests.servers.markov import Job, MarkovServer

Answer: TypeAlias = dict[str, Any]


class Host(Protocol):
    """A server with a model, which sends and spoils the answers that routes spell."""

    version: str
    has_spans: bool
    keeps_records: bool
    core: MarkovServer

    async def answer(self, request: web.Request, job: Job, shown: Callable[..., Answer]) -> Any:
        """The job's answer."""
