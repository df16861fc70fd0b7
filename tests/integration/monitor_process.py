"""`rlstreams metrics health` as a process, and what it answers."""

from __future__ import annotations

import http.client
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.e2e.command import ROOT

DEADLINE_S = 90.0


class Monitored:
    """A monitor of the run that `file` configures, on a free port."""

    def __init__(self, file: Path, *overrides: str) -> None:
        words = ("metrics", "health", str(file), "--port", "0", *overrides)
        self._log = file.with_name("monitor.log")
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "rlstreams", *words],
                env={**os.environ, "PYTHONPATH": str(ROOT)},
                stderr=log,
                stdin=subprocess.DEVNULL,
            )

    @property
    def output(self) -> str:
        return self._log.read_text("utf-8")

    def get(self, path: str) -> tuple[int, Any]:
        """Status and body; (0, {}) before it listens."""
        assert self.process.poll() is None, self.output
        found = re.search(r"http://127\.0\.0\.1:(\d+)/health", self.output)
        if found is None:
            return 0, {}
        connection = http.client.HTTPConnection("127.0.0.1", int(found.group(1)), timeout=30)
        try:
            connection.request("GET", path)
            response = connection.getresponse()
            return response.status, json.loads(response.read())
        finally:
            connection.close()

    def until(
        self, path: str, fits: Callable[[int, Any], bool], meanwhile: Callable[[], None]
    ) -> Any:
        """The first body that fits."""
        deadline_s = time.monotonic() + DEADLINE_S
        while True:
            meanwhile()
            status, body = self.get(path)
            if body and fits(status, body):
                return body
            assert time.monotonic() < deadline_s, f"{path} is {status} {body}\n{self.output}"
            time.sleep(0.1)

    def end(self) -> None:
        """Whatever it does."""
        self.process.kill()
        self.process.wait()
