"""Accepts links on one interface, each in its own thread, until it is closed."""

from __future__ import annotations

import socket
import socketserver
import threading
from collections.abc import Callable
from typing import Any

from rlstreams.workers.weights.link.frames import Connection

_LOOK_EVERY_S = 0.1  # at `close`


class LinkServer(socketserver.ThreadingTCPServer):
    """If no file descriptor or thread is free, a connection has to wait or to come again."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 64

    def __init__(
        self, host: str, serve: Callable[[Connection], None], name: str, port: int = 0
    ) -> None:
        """Listen on `host`, and on no other interface.

        Args:
            port: 0 takes any free port.

        Raises:
            OSError: no such address here, or the port is taken.
        """
        self.allow_reuse_address = port > 0  # reusable at once after a killed predecessor
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), socketserver.BaseRequestHandler)
        self._serve = serve
        self.host = host
        self.address = f"{host}:{self.server_address[1]}"
        threading.Thread(
            target=self.serve_forever, args=(_LOOK_EVERY_S,), name=name, daemon=True
        ).start()

    def finish_request(self, request: Any, client_address: Any) -> None:  # noqa: ANN401  (as there)
        """Serve a connection, in its thread."""
        self._serve(Connection(request, f"{client_address[0]}:{client_address[1]}"))

    def close(self) -> None:
        """Accept no further connection; idempotent."""
        self.shutdown()
        self.server_close()
