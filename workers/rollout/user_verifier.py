"""The worker's end of a user's reward function: child processes, each with one judgement at a time.

A child that misses its deadline or dies is replaced at the next judgement; what it held fails with
a `RewardError`. The wire is described in `verifier_process.py`.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from streams.errors import ConfigError
from workers.rollout.reward import Judgement, Metadata, RewardError

START_S = 60.0  # a user's file may import a large library
CHILDREN = 2
_CHILD = Path(__file__).with_name("verifier_process.py")


class _NoAnswerError(Exception):
    """The child missed its deadline or is gone."""


class _Child:
    """One running verifier process."""

    def __init__(self, file: Path, function: str) -> None:
        self._link, theirs = socket.socketpair()
        command = [sys.executable, "-P", str(_CHILD), str(theirs.fileno()), str(file), function]
        with theirs:
            # Its own session: Ctrl-C is not for it, and what it starts can be killed with it.
            self._process = subprocess.Popen(
                command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, stdout=2,
                start_new_session=True,
            )  # fmt: skip
        self._unread = b""

    def ask(self, request: dict[str, Any] | None, timeout_s: float) -> dict[str, Any]:
        """Send `request` (None: only listen) and wait for one reply.

        Raises:
            _NoAnswerError: says whether it hangs or how it died.
        """
        deadline_s = time.monotonic() + timeout_s
        try:
            if request is not None:
                self._link.settimeout(timeout_s)
                self._link.sendall(json.dumps(request).encode() + b"\n")
            while b"\n" not in self._unread:
                self._link.settimeout(max(deadline_s - time.monotonic(), 1e-3))
                received = self._link.recv(1 << 16)
                if not received:
                    raise _NoAnswerError(f"died with status {self._status()}")
                self._unread += received
        except TimeoutError:
            raise _NoAnswerError(f"gave no answer within {timeout_s:g} s") from None
        except OSError:
            raise _NoAnswerError(f"died with status {self._status()}") from None
        line, self._unread = self._unread.split(b"\n", 1)
        reply: dict[str, Any] = json.loads(line)
        return reply

    def kill(self) -> None:
        """End it and all that it started."""
        self._link.close()
        with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS: EPERM of a zombie
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(timeout=START_S)

    def _status(self) -> int | None:
        try:
            return self._process.wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            return None


class UserVerifier:
    """Calls `function` of `file` as a judge; at most `CHILDREN` calls run at once.

    A call waits for a free child no longer than the calls before it may take, and each of them has
    its deadline.

    Raises:
        ConfigError: from the constructor, if the file cannot be loaded or lacks the function.
    """

    def __init__(self, file: str, function: str, timeout_s: float) -> None:
        self._file = Path(file).resolve()
        self._function = function
        self._timeout_s = timeout_s
        self._closed = False
        if not self._file.is_file():
            raise ConfigError(f"reward.verifier: there is no file {self._file}")
        # None: a child that is started when a call finds the others busy.
        self._slots: queue.LifoQueue[_Child | None] = queue.LifoQueue()
        for _ in range(CHILDREN - 1):
            self._slots.put(None)
        try:
            self._slots.put(self._start())
        except RewardError as err:
            raise ConfigError(f"reward.verifier: {err}") from err

    def __call__(self, prompt: str, completion: str, answer: str, metadata: Metadata) -> Judgement:
        """Judge in a child process.

        Raises:
            RewardError: the function raised, hung, died, or returned no number.
        """
        request = {
            "prompt": prompt,
            "completion": completion,
            "answer": answer,
            "metadata": dict(metadata),
        }
        child = self._slots.get()
        try:
            child = child or self._start()
            reply = child.ask(request, self._timeout_s)
        except (_NoAnswerError, RewardError) as err:
            if child is not None:
                child.kill()
            child = None
            raise RewardError(f"verifier {self._file}:{self._function} {err}") from None
        finally:
            self._give_back(child)
        if "error" in reply:
            raise RewardError(f"verifier {reply['error']}")
        return Judgement(reward=reply["reward"], parts=reply["parts"])

    def close(self) -> None:
        """Kill the idle children; one that is judging ends with its judgement."""
        self._closed = True
        idle = []
        with contextlib.suppress(queue.Empty):
            while True:
                idle.append(self._slots.get_nowait())
        for child in idle:
            self._give_back(child)

    def _give_back(self, child: _Child | None) -> None:
        if self._closed and child is not None:
            child.kill()
            child = None
        self._slots.put(child)

    def _start(self) -> _Child:
        if self._closed:
            raise RewardError("is closed")
        child = _Child(self._file, self._function)
        try:
            reply = child.ask(None, START_S)
        except _NoAnswerError as err:
            child.kill()
            raise RewardError(f"{self._file} cannot be loaded: it {err}") from None
        if "error" in reply:
            child.kill()
            raise RewardError(str(reply["error"]))
        return child
