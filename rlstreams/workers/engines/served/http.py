"""One server over HTTP: JSON in, JSON out, every wait with a deadline that names the server.

Large answers (16k tokens with log-probs are megabytes) are decoded by msgspec.
"""

from __future__ import annotations

import asyncio
import errno
from typing import Any

import aiohttp
import msgspec

from rlstreams.workers.model.base import EngineError

Json = Any
_SHOWN = 300  # characters of an answer in a message
LONGEST_BYTES = 16 << 20  # of an answer without tokens, which describes the server
REFUSED = -1  # a status: no process listens at the address


class ServerError(EngineError):
    """A server refused, failed or answered nonsense; names server, request and field."""

    def __init__(self, message: str, *, status: int = 0) -> None:
        """Args: status: of the answer; 0: none above 399."""
        super().__init__(message)
        self.status = status


class ServerGoneError(ServerError):
    """A server did not answer, or broke off: it must be looked at before it is used again."""


class ServerHttp:
    """The client's end of one server. Belongs to one event loop."""

    def __init__(self, url: str) -> None:
        """Nothing is opened before the first call.

        Args:
            url: `http://host:port`, without a path.
        """
        self.url = url.rstrip("/")
        self._session: aiohttp.ClientSession | None = None

    async def get(self, path: str, deadline_s: float) -> Json:
        """The JSON of the answer at `path`, or its text.

        Raises:
            ServerGoneError: no answer within `deadline_s`.
            ServerError: a status above 399, or a body that is too long; names status and body.
        """
        return await self._ask("GET", path, None, deadline_s, f"GET {path}")

    async def post(
        self,
        path: str,
        body: Json,
        deadline_s: float,
        *,
        what: str = "",
        longest_bytes: int = LONGEST_BYTES,
    ) -> Json:
        """As `get`, for a POST.

        Args:
            what: names the request in messages.
            longest_bytes: of the answer; nothing is read beyond it.
        """
        return await self._ask(
            "POST", path, body, deadline_s, what or f"POST {path}", longest_bytes
        )

    async def status_of(self, path: str, deadline_s: float) -> int:
        """Status of the answer to a GET of `path`; 0: no answer; or `REFUSED`."""
        try:
            async with (
                asyncio.timeout(deadline_s),
                self._open().get(self.url + path) as answer,
            ):
                return answer.status
        except aiohttp.ClientConnectorError as err:
            return REFUSED if err.os_error.errno == errno.ECONNREFUSED else 0
        except (TimeoutError, aiohttp.ClientError, OSError):
            return 0

    async def close(self) -> None:
        """Close all connections; idempotent."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                # The engine bounds what is in flight. Servers close a connection that was idle
                # for 5 s; a request sent on one then would be lost.
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=2.0),
                timeout=aiohttp.ClientTimeout(total=None),  # each call has its own deadline
                headers={"Content-Type": "application/json"},
                read_bufsize=1 << 20,
            )
        return self._session

    async def _ask(
        self,
        method: str,
        address: str,
        body: Json,
        deadline_s: float,
        what: str,
        longest_bytes: int = LONGEST_BYTES,
    ) -> Json:
        data, what = None if body is None else msgspec.json.encode(body), f"{self.url}: {what}"
        try:
            async with (
                asyncio.timeout(deadline_s),
                self._open().request(method, self.url + address, data=data) as answer,
            ):
                content = await _read(answer, longest_bytes, what)
                if answer.status >= 500:
                    answer.close()  # servers drop a connection that an exception went through
        except TimeoutError as err:
            message = f"server {what}: no answer within {deadline_s:g} s"
            raise ServerGoneError(message) from err
        except (aiohttp.ClientError, OSError) as err:
            message = f"server {what}: connection failed: {type(err).__name__}: {err}"
            raise ServerGoneError(message) from err
        short = content[:_SHOWN].decode(errors="replace")
        if (status := answer.status) >= 400:
            raise ServerError(f"server {what}: status {status}: {short}", status=status)
        if "json" not in answer.headers.get("Content-Type", ""):
            return content.decode(errors="replace")
        try:
            return msgspec.json.decode(content)
        except msgspec.DecodeError as err:
            message = f"server {what}: the answer is not JSON ({err}): {short}"
            raise ServerError(message) from err


async def _read(answer: aiohttp.ClientResponse, longest_bytes: int, what: str) -> bytes:
    """The whole body.

    Raises:
        ServerError: it is longer than `longest_bytes`; the connection is closed.
    """
    parts, num_bytes = list[bytes](), 0
    async for part in answer.content.iter_any():
        parts.append(part)
        num_bytes += len(part)
        if num_bytes > longest_bytes:
            answer.close()
            raise ServerError(
                f"server {what}: the answer is longer than {longest_bytes:,} bytes, the most that "
                f"was asked for; it begins with {b''.join(parts)[:_SHOWN]!r}"
            )
    return b"".join(parts)
