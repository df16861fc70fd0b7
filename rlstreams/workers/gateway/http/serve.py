"""The gateway as a server on the event loop that it is started on, beside the engine.

It listens on loopback for agents that are started here and, where there are remote ones, at the
door: an address of the user's. Both lead to the same gateway.
"""

from __future__ import annotations

import asyncio
import resource
import socket
from typing import TYPE_CHECKING, Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from rlstreams.workers.gateway.http.app import KEEPALIVE_S, MAX_BODY_BYTES, Gateway
from rlstreams.workers.gateway.port import Calls, Desk, url_of

if TYPE_CHECKING:
    from rlstreams.workers.gateway.http.elsewhere import Elsewhere

MAX_CONNECTIONS = 4096
START_S = 10.0
_FIRST_WORD_S = 30.0  # a connection that says nothing holds a descriptor
_LAST_WORDS_S = 2.0  # for answers that are on their way out
_IDLE_S = 60.0  # an agent's client keeps its connection while a tool runs
_MAX_HEAD_BYTES = 64 << 10  # of a request's line and headers, which are read before its key


def _refusal(status: bytes, headers: bytes, message: bytes, kind: bytes, code: bytes) -> bytes:
    body = b'{"error":{"message":"%b","type":"%b","code":"%b"}}' % (message, kind, code)
    return (
        b"HTTP/1.1 %b\r\nconnection: close\r\n%bcontent-type: application/json\r\n"
        b"content-length: %d\r\n\r\n%b" % (status, headers, len(body), body)
    )


_FULL = _refusal(
    b"503 Service Unavailable",
    b"retry-after: 1\r\n",
    b"too many connections",
    b"server_error",
    b"overloaded",
)
_LONG_HEAD = _refusal(
    b"431 Request Header Fields Too Large",
    b"x-should-retry: false\r\n",
    b"line and headers of a request may have %d bytes" % _MAX_HEAD_BYTES,
    b"invalid_request_error",
    b"headers_too_large",
)


class _Server(uvicorn.Server):
    """Says when it listens."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """See uvicorn."""
        await super().startup(sockets)
        self.listening.set()


class GatewayServer:
    """A gateway that answers at `url`."""

    def __init__(self, server: uvicorn.Server, task: asyncio.Task[None], gateway: Gateway) -> None:
        self._server = server
        self._task = task
        self._gateway = gateway
        at = [one.sockets[0].getsockname()[:2] for one in server.servers]
        self.url = url_of(*at[0])
        """Address without a path: `ANTHROPIC_BASE_URL`; with `/v1`, `OPENAI_BASE_URL`."""
        self.door_port: int = at[-1][1]
        """Port of the door, where there is one."""

    async def close(self, deadline_s: float = 10.0) -> int:
        """Take no more requests, let those under way end, then cut them; idempotent.

        Returns how many calls were cut, since they did not end within `deadline_s`.
        """
        self._server.should_exit = True
        cut = await self._gateway.drain(deadline_s)
        await asyncio.wait([self._task], timeout=_LAST_WORDS_S)
        self._server.force_exit = True  # connections that are left wait for no call
        await asyncio.wait([self._task], timeout=_LAST_WORDS_S)
        return cut


async def start(
    calls: Calls,
    host: str = "127.0.0.1",
    port: int = 0,
    *,
    desk: Desk | None = None,
    door: tuple[str, int] | None = None,
    elsewhere: Elsewhere | None = None,
    keepalive_s: float = KEEPALIVE_S,
    max_body: int = MAX_BODY_BYTES,
    max_connections: int = MAX_CONNECTIONS,
    deadline_s: float = START_S,
) -> GatewayServer:
    """Serve `calls` on the running event loop.

    Args:
        port: 0: a free one.
        desk: of remote agents; None: there are none.
        door: a further host and port to listen at.
        elsewhere: see `Gateway`.
        max_connections: those above it are answered 503 at once; never more than half of the
            descriptors that this process may open.

    Raises:
        OSError: the address cannot be listened at; names it.
        TimeoutError: it does not listen within `deadline_s`.
    """
    gateway = Gateway(calls, desk, elsewhere=elsewhere, keepalive_s=keepalive_s, max_body=max_body)
    most = min(max_connections, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)
    config = uvicorn.Config(
        gateway.app(),
        http=_bounded(most),
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="warning",
        access_log=False,  # paths may hold keys
        server_header=False,
        backlog=1024,
        timeout_keep_alive=round(_IDLE_S),
    )
    server = _Server(config)
    listeners = [_listener(host, port)]
    if door is not None:
        try:
            listeners.append(_listener(*door))
        except OSError:
            listeners[0].close()
            raise
    task = asyncio.get_running_loop().create_task(server.serve(sockets=listeners))
    listening = asyncio.ensure_future(server.listening.wait())
    await asyncio.wait({task, listening}, timeout=deadline_s, return_when="FIRST_COMPLETED")
    if not listening.done():
        listening.cancel()
        task.cancel()
        for listener in listeners:
            listener.close()
        raise TimeoutError(f"the gateway does not listen within {deadline_s:g} s")
    return GatewayServer(server, task, gateway)


def _listener(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # Named as TCP, or the loop leaves Nagle's algorithm on: 40 ms for each answer.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except OSError as err:
        listener.close()
        raise OSError(err.errno, f"cannot listen at {host}:{port}: {err.strerror}") from err
    return listener


def _bounded(most: int) -> type[asyncio.Protocol]:
    """A protocol that holds `most` connections, none that says nothing, and no endless headers."""

    class Bounded(HttpToolsProtocol):
        """See `_bounded`."""

        def connection_made(self, transport: Any) -> None:  # noqa: ANN401
            if len(self.connections) >= most:
                self._is_refused = True
                transport.write(_FULL)
                transport.close()
                return
            self._is_refused = self._is_cut = False
            self._head_bytes = 0  # read since the last end of headers, piece of a body or its end
            super().connection_made(transport)
            self._silence = self.loop.call_later(_FIRST_WORD_S, transport.close)

        def data_received(self, data: bytes) -> None:
            if self._is_refused or self._is_cut:
                return
            self._silence.cancel()
            self._head_bytes += len(data)
            super().data_received(data)
            if self._head_bytes > _MAX_HEAD_BYTES and not self.transport.is_closing():
                self._is_cut = True
                self.transport.write(_LONG_HEAD)
                self.transport.close()

        def on_headers_complete(self) -> None:
            self._head_bytes = 0
            super().on_headers_complete()

        def on_body(self, body: bytes) -> None:
            self._head_bytes = 0
            super().on_body(body)

        def on_message_complete(self) -> None:
            self._head_bytes = 0
            super().on_message_complete()

        def connection_lost(self, exc: Exception | None) -> None:
            if not self._is_refused:
                self._silence.cancel()
                super().connection_lost(exc)

        def eof_received(self) -> None:
            if not self._is_refused:
                super().eof_received()

    return Bounded
