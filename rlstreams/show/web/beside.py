"""Live page and trackers beside a run: processes that may end without the run."""

from __future__ import annotations

import shlex
import socket
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from rlstreams.streams.log.errors import ConfigError
from rlstreams.streams.process.child import Child, Orphaned

HOST = "127.0.0.1"
STOP_S = 10.0
TRACK_STOP_S = 40.0  # it writes what is left
LOG, TRACK_LOG = "logs/web.log", "logs/track.log"  # in the folder of the run


def check_port(port: int | None) -> None:
    """Check that a page can listen there, before anything is started; None: no page.

    Raises:
        ConfigError: the port cannot be had.
    """
    if port is not None:
        listening(HOST, port, asked=f"--web {port}").close()


@contextmanager
def web_page(folder: Path, port: int | None, say: Callable[[str], None]) -> Iterator[None]:
    """Serve the page of the run in `folder` during the block; port None: no page.

    Args:
        say: called with the address.

    Raises:
        ConfigError: the port cannot be had.
    """
    if port is None:
        yield
        return
    with listening(HOST, port, asked=f"--web {port}") as held:
        port = held.getsockname()[1]
    page = _beside(folder, LOG, Orphaned.DIES, "web", str(folder), "--port", str(port))
    try:
        say(f"page: http://{HOST}:{port}/")
        yield
    finally:
        page.end(STOP_S)


@contextmanager
def trackers(
    folder: Path,
    names: Collection[str],
    say: Callable[[str], None],
    say_last: Callable[[str], None],
) -> Iterator[None]:
    """Write to the trackers of the run in `folder` during the block, and the last rows after it.

    Args:
        names: of the trackers; none: nothing is started.
        say: called with their names.
        say_last: called if one lacks rows at the end.
    """
    if not names:
        yield
        return
    # An `up` that is killed leaves it the time to write what is left.
    words = ("metrics", "track", str(folder), "--follow", "--owner", "up")
    tracker = _beside(folder, TRACK_LOG, Orphaned.DRAINS, *words)
    try:
        say(f"tracked by {', '.join(names)}; problems are in {folder / TRACK_LOG}")
        yield
    finally:
        if tracker.end(TRACK_STOP_S):
            say_last(
                f"a tracker lacks rows, see {folder / TRACK_LOG}: rlstreams metrics track "
                f"{shlex.quote(str(folder))}"
            )


def _beside(folder: Path, log: str, orphaned: Orphaned, *words: str) -> Child:
    argv = [sys.executable, "-m", "rlstreams", *words]
    return Child.started(argv, orphaned=orphaned, log=folder / log)


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
