"""One process of user code as the worker sees it: requests go out, replies come back by number.

The wires are in `verifier_process.py` and `environment_process.py`. Used by any number of
threads.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import queue
import secrets
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rlstreams.workers.rollout.descendants import VARIABLE, end_descendants

NUM_TRIES, PAUSE_S = 10, 1.0  # to start a process where the system has no room for one
START_S = 60.0  # a user's file may import a large library
WHERE_S = 0.5
CANCEL_S = 5.0  # until a call that has missed its deadline must have let go
NONSENSE = "sent what is no answer: user code has written to the link of its process"
_CHILD = Path(__file__).with_name("verifier_process.py")
_READY = 0  # number of the reply that nobody asked for

Reply = dict[str, Any]


class NoAnswerError(Exception):
    """The child missed its deadline, is gone or talks nonsense; says which and where."""


class GoneError(NoAnswerError):
    """It was ended by no doing of this call: before it was sent, or on behalf of another."""


class LateError(NoAnswerError):
    """It missed the deadline of this very call."""


class NoRoomError(NoAnswerError):
    """The system has no process, memory or file descriptor for it, and had none for a while."""


def started(
    spec: str,
    timeout_s: float,
    program: Path = _CHILD,
    is_wanted: Callable[[], bool] = lambda: True,
) -> Child:
    """A child, tried for again where the system has no room for one at the moment.

    Args:
        is_wanted: asked before each further try.

    Raises:
        NoRoomError: there was none `NUM_TRIES` times, `PAUSE_S` apart; says what was lacking.
    """
    for number in itertools.count(1):
        try:
            return Child(spec, timeout_s, program)
        except OSError as err:
            if number >= NUM_TRIES or not is_wanted():
                raise NoRoomError(
                    f"has no process: in {number} tries, {PAUSE_S:g} s apart, none could be "
                    f"started: {err}"
                ) from None
        time.sleep(PAUSE_S)
    raise AssertionError("counting has no end")


@contextlib.contextmanager
def _closed_unless_done(link: socket.socket) -> Iterator[None]:
    try:
        yield
    except BaseException:
        link.close()
        raise


class Child:
    """A process that has one function loaded, once `begin` has returned.

    Raises:
        OSError: from the constructor, if the system has no room for it.
    """

    def __init__(self, spec: str, timeout_s: float, program: Path = _CHILD) -> None:
        self._link, theirs = socket.socketpair()
        # A child that is stopped reads nothing: sending ends then too.
        send_limit = struct.pack("ll", int(timeout_s) + 1, 0)
        self._link.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, send_limit)
        command = [sys.executable, "-P", str(program), str(theirs.fileno())]
        # Not as an argument: it may hold secrets, and those are for all to see.
        with (
            _closed_unless_done(self._link),
            theirs,
            tempfile.TemporaryFile("w+", encoding="utf-8") as told,
        ):
            told.write(spec)
            told.seek(0)
            # Its own session: Ctrl-C is not for it, and what it starts can be killed with it.
            self._mark = secrets.token_hex(8)
            self._process = subprocess.Popen(
                command, pass_fds=[theirs.fileno()], stdin=told, stdout=2,
                start_new_session=True, env={**os.environ, VARIABLE: self._mark},
            )  # fmt: skip
        self._timeout_s = timeout_s
        self._is_ended = False
        self._was_ended = False  # by this side, before it died of anything
        self._lock = threading.Lock()
        self._sending = threading.Lock()
        self._numbers = itertools.count(_READY + 1)
        self._sent = _READY
        ready: queue.SimpleQueue[Reply | None] = queue.SimpleQueue()
        self._waiting = {_READY: ready}
        self._ready = ready
        self.broken = ""
        """Why it answers no more; empty: it does."""
        self.place = ""
        """`file:line` of the function, once it is loaded."""
        self.is_async = False
        self._cancels = False  # a call that hangs can be told to let go
        self.wants: frozenset[str] = frozenset()
        """What the function takes beyond what it must."""
        self._reader = threading.Thread(target=self._read, name="verifier-link", daemon=True)
        try:
            self._reader.start()
        except RuntimeError as err:  # what threading says where there is no room for one
            self._process.kill()
            self._process.wait()
            self._link.close()
            raise OSError(errno.EAGAIN, str(err)) from None

    def begin(self) -> Reply:
        """Wait until the function is loaded; the reply says `error` if it cannot be.

        Raises:
            NoAnswerError: it hangs or died.
        """
        reply = self._reply(_READY, self._ready, START_S)
        self.place = str(reply.get("ready", ""))
        self.is_async = bool(reply.get("is_async", False))
        self._cancels = bool(reply.get("cancels", self.is_async))
        self.wants = frozenset(reply.get("wants", ()))
        return reply

    def ask(self, request: Mapping[str, Any], last_s: float = 0.0) -> Reply:
        """Send `request` and wait for its reply, for as long as the child's calls may take.

        A call that misses its deadline is cancelled where the child can do so; one that does not
        let go ends the process, and with it what else it held.

        Args:
            last_s: the deadline of a last request, which ends the process if it is missed.

        Raises:
            LateError: it hangs; says where.
            GoneError: it was ended, and not by this call.
            NoAnswerError: says how it died.
        """
        timeout_s = last_s or self._timeout_s
        number, box = self._send(request)
        try:
            return self._reply(number, box, timeout_s)
        except TimeoutError:
            told = f"gave no answer within {timeout_s:g} s{self._whereabouts(number)}"
            if last_s or not (self._cancels and self._cancel(number)):
                self.end(f"was ended because another call {told} and did not let go")
            raise LateError(told) from None

    def end(self, reason: str) -> None:
        """Kill it and all that it started; what waits for it fails with `reason`."""
        self._break(reason, is_ended=True)
        with self._lock:
            is_first, self._is_ended = not self._is_ended, True
        if not is_first:  # by now its number may be another process's
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS: EPERM of a zombie
            os.killpg(self._process.pid, signal.SIGKILL)
        end_descendants(self._mark)  # those in sessions of their own
        with contextlib.suppress(OSError):
            self._link.shutdown(socket.SHUT_RDWR)
        self._process.wait(timeout=START_S)
        if threading.current_thread() is not self._reader:
            self._reader.join(timeout=START_S)
        self._link.close()

    def _send(self, request: Mapping[str, Any]) -> tuple[int, queue.SimpleQueue[Reply | None]]:
        box: queue.SimpleQueue[Reply | None] = queue.SimpleQueue()
        with self._lock:
            if self.broken:
                raise GoneError(self.broken)
            number = self._sent = next(self._numbers)
            self._waiting[number] = box
        try:
            with self._sending:
                self._link.sendall(json.dumps({"id": number, **request}).encode() + b"\n")
        except BlockingIOError:
            self.end("was ended because it took no request")
            raise LateError(f"gave no answer within {self._timeout_s:g} s") from None
        except OSError:
            pass  # it is gone: the reader says how
        return number, box

    def _reply(self, number: int, box: queue.SimpleQueue[Reply | None], timeout_s: float) -> Reply:
        try:
            reply = box.get(timeout=timeout_s)
        except queue.Empty:
            if number == _READY:
                raise NoAnswerError(f"gave no answer within {timeout_s:g} s") from None
            raise TimeoutError from None
        finally:
            with self._lock:
                self._waiting.pop(number, None)
        if reply is None:
            raise (GoneError if self._was_ended else NoAnswerError)(self.broken)
        return reply

    def _whereabouts(self, number: int) -> str:
        """`, at file:line` while the child can say; one that is deep in a library cannot."""
        try:
            asked, box = self._send({"where": number})
            place = self._reply(asked, box, WHERE_S).get("where", "")
        except (TimeoutError, NoAnswerError):
            return ""
        return f": it is at {place}" if place else ""

    def _cancel(self, number: int) -> bool:
        try:
            self._reply(*self._send({"cancel": number}), CANCEL_S)
        except (TimeoutError, NoAnswerError):
            return False
        return True

    def _read(self) -> None:
        """Hand out replies until the link closes."""
        unread = b""
        try:
            while received := self._link.recv(1 << 16):
                *lines, unread = (unread + received).split(b"\n")
                for line in lines:
                    self._hand_out(json.loads(line))
        except (ValueError, KeyError, TypeError):
            self._break(NONSENSE)
            return
        except OSError:
            pass
        self._break(self._death())

    def _hand_out(self, reply: Reply) -> None:
        number = reply["id"]
        with self._lock:
            box = self._waiting.get(number)
            is_late = type(number) is int and _READY <= number <= self._sent
        if box is not None:
            box.put(reply)
        elif not is_late:
            raise ValueError(number)

    def _break(self, reason: str, *, is_ended: bool = False) -> None:
        with self._lock:
            if not self.broken:
                self.broken, self._was_ended = reason, is_ended
            waiting = list(self._waiting.values())
        for box in waiting:
            box.put(None)

    def _death(self) -> str:
        try:
            status = self._process.wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            return "closed its link"
        return f"died with status {status}"
