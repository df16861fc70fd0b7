"""Live page and trackers beside a run: processes that may end without the run."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from rlstreams.streams.log.errors import ConfigError

HOST = "127.0.0.1"
STOP_S = 10.0
TRACK_STOP_S = 40.0  # it writes what is left
LOG, TRACK_LOG = "logs/web.log", "logs/track.log"  # in the folder of the run


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
    with _beside(folder, LOG, "web", str(folder), "--port", str(port)) as process:
        say(f"page: http://{HOST}:{port}/")
        try:
            yield
        finally:
            _end(process, STOP_S)


@contextmanager
def trackers(
    folder: Path,
    names: Collection[str],
    say: Callable[[str], None],
    say_last: Callable[[str], None],
) -> Iterator[None]:
    """Write to the trackers of the run in `folder` during the block, and what is left behind it.

    Args:
        names: of the trackers; none: nothing is started.
        say: told which they are.
        say_last: told when one lacks rows at the end.
    """
    if not names:
        yield
        return
    words = ("track", str(folder), "--follow", "--caller-fd", "0")
    with _beside(folder, TRACK_LOG, *words) as process:
        say(f"tracked by {', '.join(names)}; problems are in {folder / TRACK_LOG}")
        try:
            yield
        finally:
            if _end(process, TRACK_STOP_S):
                say_last(
                    f"a tracker lacks rows, see {folder / TRACK_LOG}: rlstreams track {folder}"
                )


@contextmanager
def _beside(folder: Path, log: str, *words: str) -> Iterator[subprocess.Popen[bytes]]:
    """Its standard input is a pipe that closes with this process, however it ends."""
    with (folder / log).open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "rlstreams", *words],
            stdin=subprocess.PIPE, stdout=output, stderr=output, start_new_session=True,
        )  # fmt: skip
        assert process.stdin is not None
        with process.stdin:
            yield process


def _end(process: subprocess.Popen[bytes], within_s: float) -> int:
    process.terminate()
    try:
        return process.wait(within_s)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


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
