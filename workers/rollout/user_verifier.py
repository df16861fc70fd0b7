"""The worker's side of a reward function: child processes, each with one call at a time.

A child that misses its deadline, dies or sends invalid data is replaced at the next call; its
current call fails with a `RewardError`. The protocol is described in `verifier_process.py`.
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
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from streams.errors import ConfigError
from workers.config.options import Option
from workers.rollout.reward import Judgement, Metadata, RewardError

START_S = 60.0  # a user's file may import a large library
WHERE_S = 0.5
NONSENSE = "sent what is no answer: user code has written to the link of its process"
_CHILD = Path(__file__).with_name("verifier_process.py")


@dataclass(frozen=True, slots=True, kw_only=True)
class Function:
    """A reward function, and how it is called."""

    name: str
    file: str = ""  # absolute path, or empty ...
    module: str = ""  # ... and the name of a module
    options: Mapping[str, Option] = field(default_factory=dict)
    timeout_s: float = 10.0
    memory_mb: int = 0
    processes: int = 2
    title: str = ""  # for messages; empty: made from the others

    def __str__(self) -> str:
        return self.title or f"{self.file or self.module}:{self.name}"

    def spec(self) -> str:
        """What the child is told."""
        return json.dumps(
            {
                "file": self.file,
                "module": self.module,
                "function": self.name,
                "options": dict(self.options),
                "memory_mb": self.memory_mb,
            }
        )


class _NoAnswerError(Exception):
    """The child missed its deadline, is gone or talks nonsense; says which and where."""


class _Child:
    """One running verifier process."""

    def __init__(self, function: Function) -> None:
        self._link, theirs = socket.socketpair()
        command = [sys.executable, "-P", str(_CHILD), str(theirs.fileno()), function.spec()]
        with theirs:
            # Its own session: Ctrl-C is not for it, and what it starts can be killed with it.
            self._process = subprocess.Popen(
                command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, stdout=2,
                start_new_session=True,
            )  # fmt: skip
        self._unread = b""
        self.place = ""
        """`file:line` of the function, once it is loaded."""

    def ask(self, request: dict[str, Any] | None, timeout_s: float) -> dict[str, Any]:
        """Send `request` (None: only listen) and wait for one reply.

        Raises:
            _NoAnswerError: says whether it hangs, and where, or how it died.
        """
        try:
            if request is not None:
                self._link.settimeout(timeout_s)
                self._link.sendall(json.dumps(request).encode() + b"\n")
            return self._reply(timeout_s)
        except TimeoutError:
            told = f"gave no answer within {timeout_s:g} s"
            raise _NoAnswerError(f"{told}{self._whereabouts()}") from None
        except OSError:
            raise _NoAnswerError(self._death()) from None
        except ValueError:
            raise _NoAnswerError(NONSENSE) from None

    def kill(self) -> None:
        """End it and all that it started."""
        self._link.close()
        with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS: EPERM of a zombie
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(timeout=START_S)

    def _reply(self, timeout_s: float) -> dict[str, Any]:
        deadline_s = time.monotonic() + timeout_s
        while b"\n" not in self._unread:
            self._link.settimeout(max(deadline_s - time.monotonic(), 1e-3))
            received = self._link.recv(1 << 16)
            if not received:
                raise _NoAnswerError(self._death())
            self._unread += received
        line, self._unread = self._unread.split(b"\n", 1)
        reply = json.loads(line)
        if not isinstance(reply, dict):
            raise _NoAnswerError(NONSENSE)
        return reply

    def _whereabouts(self) -> str:
        """`, at file:line` while the child can say; one that is deep in a library cannot."""
        try:
            self._link.settimeout(WHERE_S)
            self._link.sendall(b'{"where": true}\n')
            place = self._reply(WHERE_S).get("where", "")
        except (OSError, ValueError, _NoAnswerError):
            return ""
        return f": it is at {place}" if place else ""

    def _death(self) -> str:
        try:
            status = self._process.wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            return "closed its link"
        return f"died with status {status}"


class UserVerifier:
    """Calls a function as a judge; at most `processes` calls run at once.

    A call waits for a free child no longer than the calls before it may take, and each of them has
    its deadline.

    Raises:
        ConfigError: from the constructor, if the function cannot be loaded.
    """

    def __init__(self, function: Function, field: str = "reward.verifier") -> None:
        self._function = function
        self._closed = False
        if function.file and not Path(function.file).is_file():
            raise ConfigError(f"{field}: there is no file {function.file}")
        # None: a child that is started when a call finds the others busy.
        self._slots: queue.LifoQueue[_Child | None] = queue.LifoQueue()
        for _ in range(function.processes - 1):
            self._slots.put(None)
        try:
            self._slots.put(self._start())
        except RewardError as err:
            raise ConfigError(f"{field}: {err}") from err

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
        place = ""
        try:
            child = child or self._start()
            place = child.place
            reply = child.ask(request, self._function.timeout_s)
            if "error" not in reply:
                return _judgement(reply)
        except (_NoAnswerError, RewardError) as err:
            if child is not None:
                child.kill()
            child = None
            named = f"{place}: {self._function.name}" if place else self._function
            raise RewardError(f"verifier {named} {err}") from None
        finally:
            self._give_back(child)
        raise RewardError(f"verifier {reply['error']}")

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
        child = _Child(self._function)
        try:
            reply = child.ask(None, START_S)
        except _NoAnswerError as err:
            child.kill()
            raise RewardError(f"{self._function} cannot be loaded: it {err}") from None
        if "error" in reply:
            child.kill()
            raise RewardError(str(reply["error"]))
        child.place = str(reply.get("ready", ""))
        return child


def _judgement(reply: dict[str, Any]) -> Judgement:
    try:
        return Judgement(
            reward=float(reply["reward"]),
            parts={str(name): float(value) for name, value in reply["parts"].items()},
        )
    except (KeyError, TypeError, ValueError, AttributeError):
        raise _NoAnswerError(NONSENSE) from None
