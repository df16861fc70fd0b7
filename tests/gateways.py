"""A gateway over fake calls, on a thread of its own, for clients that block."""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from rlstreams.workers.engines.thread import EngineThread
from rlstreams.workers.gateway.http.serve import GatewayServer, start
from rlstreams.workers.gateway.keys import Keys
from tests.fake_calls import FakeCalls, Says, echo

NEVER_S = 2**33
DEADLINE_S = 20.0
KEYS = Keys("secret")


@dataclass(frozen=True)
class Running:
    """A gateway that runs."""

    url: str
    calls: FakeCalls
    thread: EngineThread
    server: GatewayServer

    def key(self, session: str = "7/3", start: int = 0) -> str:
        return KEYS.make(session, start, NEVER_S)

    def hold(self, is_held: bool = True) -> None:
        """Samples wait."""
        gate = self.calls.gate

        async def set_gate() -> None:
            (gate.clear if is_held else gate.set)()

        self.thread.wait(set_gate(), DEADLINE_S, "the gate")


@contextmanager
def gateway(says: Says = echo, **options: Any) -> Iterator[Running]:
    """Started and closed; what it logs is the test's to look at."""
    calls = FakeCalls(KEYS, says)
    thread = EngineThread("gateway-test")
    server = thread.wait(start(calls, **options), DEADLINE_S, "the gateway's start")
    try:
        yield Running(server.url, calls, thread, server)
    finally:
        calls.gate.set()
        thread.wait(server.close(2.0), DEADLINE_S, "the gateway's end")
        thread.close()


def connected(running: Running) -> socket.socket:
    place = urlsplit(running.url)
    return socket.create_connection((place.hostname, place.port), DEADLINE_S)


def head(running: Running, *more: str) -> bytes:
    lines = ["POST /v1/chat/completions HTTP/1.1", "host: x", f"x-api-key: {running.key()}", *more]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


class Words(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))
