"""The live page beside a run: a process of its own, which may end without the run; its port."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rlstreams.streams.log.errors import ConfigError

HOST = "127.0.0.1"
STOP_S = 10.0
LOG = "logs/web.log"  # in the folder of the run


@contextmanager
def web_page(folder: Path, port: int | None, say: Callable[[str], None]) -> Iterator[None]:
    """Serve the page of the run in `folder` during the block; port None: no page.

    Args:
        say: told the address.

    Raises:
        ConfigError: the port cannot be had.
    """
    if port is None:
        yield
        return
    with listening(HOST, port, asked=f"--web {port}") as held:
        port = held.getsockname()[1]
    words = [sys.executable, "-m", "rlstreams", "web", str(folder), "--port", str(port)]
    with (folder / LOG).open("ab") as output:
        process = subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )  # fmt: skip
    say(f"page: http://{HOST}:{port}/")
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def listening(host: str, port: int, *, asked: str = "") -> socket.socket:
    """A socket that listens there.

    Args:
        asked: the option that names the address; default: `--host` and `--port`.

    Raises:
        ConfigError: the address cannot be had.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    found = socket.socket(family, socket.SOCK_STREAM)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        found.bind((host, port))
        found.listen()
    except OSError as err:
        found.close()
        asked = asked or f"--host {host} --port {port}"
        raise ConfigError(f"{asked} cannot be had: {err}; choose another") from err
    return found
