"""A real Chromium without a window, driven over its debugging pipe: what a person would see."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any, Self

DEADLINE_S = 120.0
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or ""
_FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
          "--remote-debugging-pipe", "--no-first-run")  # fmt: skip


class Browser:
    """One page. Use it in a `with` block; every address that the page asks for is in `requests`."""

    def __init__(self, profile: Path, width: int = 1280, height: int = 900) -> None:
        to_read, self._to = os.pipe()
        self._from, to_write = os.pipe()

        words = [CHROMIUM, *_FLAGS, f"--user-data-dir={profile}", "about:blank"]
        # It reads from file descriptor 3 and writes to 4.
        shell = f'exec 3<"/dev/fd/{to_read}" 4>"/dev/fd/{to_write}"; exec "$@"'
        self._process = subprocess.Popen(
            ["sh", "-c", shell, "sh", *words], pass_fds=(to_read, to_write),
            start_new_session=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(to_read), os.close(to_write)
        self._left = b""
        self._number = 0
        self._session = ""
        self.requests: list[str] = []
        self.errors: list[str] = []
        page = self._call("Target.createTarget", url="about:blank")["targetId"]
        attached = self._call("Target.attachToTarget", targetId=page, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Network", "Runtime", "Log"):
            self._call(f"{domain}.enable")
        self.resize(width, height)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait(DEADLINE_S)
        os.close(self._to), os.close(self._from)

    def resize(self, width: int, height: int) -> None:
        """The size of its window, in CSS pixels."""
        self._call("Emulation.setDeviceMetricsOverride", width=width, height=height,
                   deviceScaleFactor=1, mobile=width < 600)  # fmt: skip

    def open(self, address: str, ready: str = "document.readyState === 'complete'") -> float:
        """Go there and wait until `ready` is true; returns the seconds that it took."""
        began_s = time.monotonic()
        self._call("Page.navigate", url=address)
        self.wait(f"location.href !== 'about:blank' && ({ready})")
        return time.monotonic() - began_s

    def run(self, script: str) -> Any:
        """The value of an expression in the page."""
        found = self._call("Runtime.evaluate", expression=script, returnByValue=True,
                           awaitPromise=True)  # fmt: skip
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait(self, script: str) -> None:
        """Until the expression is true."""
        until_s = time.monotonic() + DEADLINE_S
        while not self.run(f"Boolean({script})"):
            assert time.monotonic() < until_s, f"never true: {script}"
            time.sleep(0.02)

    def screenshot(self, file: Path, *, whole: bool = False) -> None:
        """What is to be seen, as PNG; with `whole` the page to its end."""
        found = self._call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        file.write_bytes(base64.b64decode(found["data"]))

    def as_on_paper(self, width: int) -> None:
        """Laid out as it is printed, on a sheet of so many CSS pixels: the page hears of it before
        it has that width, and its window stays as it is."""
        self.run("dispatchEvent(new Event('beforeprint')) && 0")
        self._call("Emulation.setEmulatedMedia", media="print")
        self.run(f"document.body.style.width = '{width}px'")

    def paper(self, file: Path) -> None:
        """What it prints: A4, as PDF."""
        found = self._call("Page.printToPDF", printBackground=True, paperWidth=8.27,
                           paperHeight=11.69)  # fmt: skip
        file.write_bytes(base64.b64decode(found["data"]))

    def _call(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        asked = {"id": self._number, "method": method, "params": params}
        if self._session:
            asked["sessionId"] = self._session
        os.write(self._to, json.dumps(asked).encode() + b"\0")
        while True:
            message = self._next()
            if message.get("id") == self._number:
                assert "error" not in message, message
                return dict(message["result"])

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._left:
            more = os.read(self._from, 1 << 16)
            assert more, "Chromium has ended"
            self._left += more
        text, _, self._left = self._left.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        if message.get("method") == "Network.requestWillBeSent":
            self.requests.append(message["params"]["request"]["url"])
        if message.get("method") == "Runtime.exceptionThrown":
            self.errors.append(str(message["params"]["exceptionDetails"]))
        if message.get("method") == "Log.entryAdded":  # on its console
            entry = message["params"]["entry"]
            if entry["level"] == "error":
                self.errors.append(f"{entry['text']} ({entry.get('url', '')})")
        return message
