"""State of one worker over HTTP, without Kafka: `/health` for probes, `/load` for its load.

A thread of its own answers, so a worker whose loop is stuck shows too. It changes nothing: pause,
resume and drain are events in `control`.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rlstreams.schemas.events import WorkerReport
from rlstreams.streams.log.errors import ConfigError

SILENT_S = 30.0  # a worker ticks many times a second, and reports progress in a long tick
_SAID = ("worker", "role", "instance", "host", "state", "detail", "policy_version", "at_ms")


class Health:
    """The last report of a worker, and the time of its loop's last tick."""

    def __init__(self, worker: str) -> None:
        self._ticked_s: float | None = None  # None while it starts, and loads its model
        self._said: dict[str, object] = {"worker": worker, "state": "starting"}
        self._load: dict[str, object] = {}

    def beat(self) -> None:
        """Note that the loop came round, or came forward within a tick."""
        self._ticked_s = time.monotonic()

    def report(self, report: WorkerReport, load: Mapping[str, object]) -> None:
        """Take the worker's report and load, once a second."""
        self._said = {name: getattr(report, name) for name in _SAID}
        self._load = {**load, "counters": report.counters}

    def answer(self, path: str) -> tuple[int, dict[str, object]]:
        """Status and body for a request."""
        if path == "/load":
            return 200, {**self._said, **self._load}
        if path != "/health":
            return 404, {"error": f"there is no {path}, only /health and /load"}
        since_s = 0.0 if self._ticked_s is None else time.monotonic() - self._ticked_s
        ok = self._ticked_s is None or since_s < SILENT_S
        return 200 if ok else 503, {"ok": ok, **self._said, "since_last_turn_s": round(since_s, 1)}

    @contextmanager
    def served(self, host: str, port: int) -> Iterator[int]:
        """Answer requests within the block; gives the port.

        Args:
            port: 0 takes any free port.

        Raises:
            ConfigError: the address cannot be used.
        """
        from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

        answer = self.answer

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                status, found = answer(self.path)
                body = json.dumps(found).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: Any) -> None: ...  # noqa: ANN401

        try:
            server = ThreadingHTTPServer((host, port), Handler)
        except OSError as err:
            raise ConfigError(f"--health-port {host}:{port} cannot be had: {err}") from err
        with server:
            threading.Thread(target=server.serve_forever, name="health", daemon=True).start()
            try:
                yield server.server_port
            finally:
                server.shutdown()
