"""A process that has imported the heavy libraries once, and forks children that need them.

It lives in a session of its own, as its children do: the terminal's signals to its foreground group
must not end it, for it passes on the exit statuses of its children.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.process
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import TypeVar

from rlstreams.streams.process.bytecode import FORBIDS
from rlstreams.streams.process.child import Child

UNLEARNT = 255  # multiprocessing's status where the fork server, which alone knew it, is gone
LONGEST = 71  # bytes of its folder's path: a socket's has 103 (macOS), 32 of them below the folder
_ITS_COMMAND = "from multiprocessing.forkserver import main"  # line

C = TypeVar("C", bound=Child)
Run = Callable[[Sequence[str]], int]


class ForkServer:
    """A fork server. Make it early: it imports while this process goes on."""

    def __init__(self, context: ForkServerContext, preload: Sequence[str]) -> None:
        """
        Args:
            preload: modules that its children need; none may start a thread.
        """
        from multiprocessing import forkserver, util

        self._context = context
        before, tempfile.tempdir = tempfile.gettempdir(), _folder()
        util.get_temp_dir()  # made once, for its socket
        tempfile.tempdir = before
        context.set_forkserver_preload([__name__, *preload])
        forkserver.ensure_running()

    def started(self, kind: type[C], run: Run, argv: Sequence[str], *, log: Path) -> C:
        """Fork a child that drains when we are gone (`Orphaned.DRAINS`); `run` returns its status.

        Args:
            run: a module's function; it gets `argv`, the command that would start the same child.
            log: as in `Child.started`.
        """
        log_start = log.stat().st_size if log.exists() else 0
        theirs, ours = self._context.Pipe(duplex=False)
        process = self._context.Process(target=_be, args=(run, argv, log, theirs), daemon=False)
        process.start()
        theirs.close()
        owner_fd = os.dup(ours.fileno())
        ours.close()
        return kind(Forked(process), owner_fd, log=log, log_start=log_start)


def fork_context() -> ForkServerContext | None:
    """Return the context of a fork server; None: the system has none, or no folder for its
    socket."""
    if "forkserver" not in multiprocessing.get_all_start_methods() or _folder() is None:
        return None
    return multiprocessing.get_context("forkserver")


def _folder() -> str | None:
    """Return a folder for temporary files whose path is short enough for a socket's; None: none."""
    if len(os.fsencode(own := tempfile.gettempdir())) <= LONGEST:
        return own
    usual = ("/tmp", "/var/tmp")
    return next((folder for folder in usual if os.access(folder, os.W_OK | os.X_OK)), None)


class Forked:
    """A multiprocessing process as a `Handle`."""

    def __init__(self, process: multiprocessing.process.BaseProcess) -> None:
        self._process = process

    @property
    def pid(self) -> int:
        """See `Handle`."""
        assert self._process.pid is not None
        return self._process.pid

    def poll(self) -> int | None:
        """See `Handle`."""
        status = self._process.exitcode
        if status == UNLEARNT:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, 0)
                return None  # the child lives on without the fork server
        return status


def _be(run: Run, argv: Sequence[str], log: Path, pipe: Connection) -> None:
    """Run in the child: set up session and descriptors as for its command, then call `run`."""
    _lead()
    log_fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for fd, target_fd in ((pipe.fileno(), 0), (log_fd, 1), (log_fd, 2)):
        os.dup2(fd, target_fd)
    os.close(log_fd)
    pipe.close()
    sys.exit(run(argv))


def _lead() -> None:
    """Lead a session, unless this process does: in a fork server that had begun without this
    module, the child imports it and comes here twice."""
    if os.getsid(0) != os.getpid():
        os.setsid()


if any(word.startswith(_ITS_COMMAND) for word in sys.orig_argv):
    _lead()  # the fork server imports this module first
    # multiprocessing starts it with the -B that its parent's environment once asked for.
    sys.dont_write_bytecode = bool(os.environ.get(FORBIDS))
