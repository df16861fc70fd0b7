"""Requests for a session that went to another worker with its partition: they are passed on.

A client from outside knows the address of the worker that gave it its session, and no other. While
the session is between two workers its requests wait, and then they are told when to come again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Protocol

import aiohttp
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from rlstreams.workers.gateway.http.hang_ups import unless_hung_up
from rlstreams.workers.gateway.port import CallRefusedError, moving

WAIT_S = 20.0  # proxies cut a silent request at 60 s, and clients try again a few times only
LOOK_S = 0.5  # between two looks for the session
ASK_S = 5.0  # for a worker that is asked for it
PASSED_ON = "x-rlstreams-passed-on"  # a request with it is passed on no further
_HOP = {  # headers of one connection, and those that are written anew
    *("connection", "content-length", "host", "keep-alive", "te", "trailer", "transfer-encoding"),
    *("upgrade", "accept-encoding", "expect", "authorization", "x-api-key", "x-goog-api-key"),
}


class KnownSessions(Protocol):
    """Whether a session is open here, by its key."""

    def is_known(self, key: str) -> bool:
        """Whether it is open here, or ended here."""

    def is_lost(self, key: str) -> bool:
        """Whether it was open here, and its client goes on with it elsewhere."""


class Elsewhere:
    """Finds the other worker, and passes on requests and answers. Belongs to one event loop."""

    def __init__(self, sessions: KnownSessions, addresses: Callable[[], Sequence[str]]) -> None:
        """
        Args:
            addresses: of the other workers' gateways, as far as is known now.
        """
        self._sessions = sessions
        self._addresses = addresses
        self._http: aiohttp.ClientSession | None = None

    async def answer(
        self, request: Request, key: str, read: Callable[[Request], Awaitable[bytes]]
    ) -> Response | None:
        """The answer of the worker that has the session; None: it is this one, or none is known.

        Args:
            read: gives the body.

        Raises:
            CallRefusedError: 410, it is over; 503, it is between two workers.
        """
        until_s = time.monotonic() + WAIT_S
        while PASSED_ON not in request.headers and not self._sessions.is_known(key):
            told = dict(await asyncio.gather(*(self._ask(one, key) for one in self._addresses())))
            if holder := next((at for at, status in told.items() if status == 200), ""):
                return await self._passed_on(request, holder, key, await read(request))
            if 410 in told.values():
                raise CallRefusedError(410, "session_closed", "the session is over")
            if not (self._sessions.is_lost(key) or 503 in told.values()):
                return None
            if time.monotonic() > until_s:
                raise moving()
            await asyncio.sleep(LOOK_S)
        return None

    async def _ask(self, address: str, key: str) -> tuple[str, int]:
        """A worker's address, and its word on a session: 200, it is open there; 410, it ended
        there; 503, it may come there, or has left it, or nobody answers; 404, it is not known."""
        headers = {"authorization": f"Bearer {key}", PASSED_ON: "1"}
        limit = aiohttp.ClientTimeout(total=ASK_S)
        try:
            post = self._client.post(f"{address}/v1/heartbeat", headers=headers, timeout=limit)
            async with post as answer:
                is_over = answer.status == 410 and b'"session_closed"' in await answer.read()
                return address, 410 if is_over else 404 if answer.status == 410 else answer.status
        except (aiohttp.ClientError, TimeoutError, OSError):
            return address, 503

    async def _passed_on(self, request: Request, address: str, key: str, body: bytes) -> Response:
        headers = {name: value for name, value in request.headers.items() if name not in _HOP}
        headers |= {"authorization": f"Bearer {key}", PASSED_ON: "1"}
        path = request.url.path
        url = f"{address}{path[path.index('/v1/') :]}"
        try:
            answer = await unless_hung_up(request, self._post(url, body, headers))
        except aiohttp.ClientError:
            raise moving() from None
        told = {name.lower(): value for name, value in answer.headers.items()}
        told = {name: value for name, value in told.items() if name not in {*_HOP, "date"}}
        return StreamingResponse(_pieces(answer), answer.status, told)

    async def _post(self, url: str, body: bytes, headers: dict[str, str]) -> aiohttp.ClientResponse:
        return await self._client.post(url, data=body, headers=headers)

    @property
    def _client(self) -> aiohttp.ClientSession:
        if self._http is None:
            self._http = aiohttp.ClientSession(
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=ASK_S),
                connector=aiohttp.TCPConnector(limit=0),
                auto_decompress=False,
            )
        return self._http

    async def close(self) -> None:
        """Let go of connections."""
        if self._http is not None:
            await self._http.close()


async def _pieces(answer: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """The body, as it comes; whoever stops reading hangs up there, too."""
    try:
        async for piece in answer.content.iter_any():
            yield piece
    finally:
        answer.close()
