"""The worker's side of a reward function: calls are spread over child processes.

A plain function has one call at a time in each process, an `async def` has `concurrency` of them. A
child that misses its deadline, dies or sends invalid data is replaced; the calls that it had fail
with a `RewardError`. The protocol is described in `verifier_process.py`.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlstreams.streams.log.errors import ConfigError, DeadlineError
from rlstreams.workers.config.nearest import meant_path
from rlstreams.workers.config.options import Option
from rlstreams.workers.rollout.reward import Ending, Judgement, Metadata, RewardError
from rlstreams.workers.rollout.verifier_child import (
    NONSENSE,
    Child,
    NoAnswerError,
    NoRoomError,
    Reply,
    started,
)

PAUSE_S = 0.25  # before the second attempt, four times as long before each further one


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
    attempts: int = 1  # calls for one answer while it raises
    concurrency: int = 1  # calls at a time in a process, if it is asynchronous
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


def located(name: str) -> tuple[str, str, str] | None:
    """File, module and name of `file.py:name` or `module:name`; None: it is neither."""
    place, colon, code = name.rpartition(":")
    if not colon or not code.isidentifier():
        return None
    if place.endswith(".py"):
        return str(Path(place).resolve()), "", code
    return ("", place, code) if re.fullmatch(r"\w+(\.\w+)*", place) else None


class UserVerifier:
    """Calls a function as a judge; at most `processes` times what one takes run at once.

    A call waits for a place no longer than the calls before it may take, and each of them has its
    deadline.

    Raises:
        ConfigError: from the constructor, if the function cannot be loaded.
        DeadlineError: from the constructor, if the system has no process for it.
    """

    def __init__(self, function: Function, field: str = "reward.verifier") -> None:
        self._function = function
        self._closed = False
        self._ended = threading.Event()  # ends the pauses
        if function.file and not Path(function.file).is_file():
            raise ConfigError(
                f"{field}: there is no file {function.file}{meant_path(function.file)}"
            )
        self._changed = threading.Condition()
        self._num_calls: dict[Child, int] = {}  # under way, by running child
        self._num_starting = 0
        try:
            self._give_back(self._start())
        except NoRoomError as err:
            raise DeadlineError(f"verifier {function} {err}") from None
        except RewardError as err:
            raise ConfigError(f"{field}: {err}") from err

    def __call__(
        self, prompt: str, completion: str, answer: str, metadata: Metadata, ending: Ending
    ) -> Judgement:
        """Judge in a child process; again, after a pause, what raised and may fare better.

        Raises:
            RewardError: the function raised, hung, died, returned no number, or the system has no
                process for it.
        """
        request = {
            "prompt": prompt,
            "completion": completion,
            "answer": answer,
            "metadata": dict(metadata),
        }
        error: object = "is closed"
        for attempt in range(self._function.attempts):
            if attempt and self._ended.wait(PAUSE_S * 4 ** (attempt - 1)):
                break
            reply = self._ask(request, ending)
            if isinstance(reply, Judgement):
                return reply
            error = reply["error"]
            if not reply.get("again"):
                break
        tries = f", the last of {attempt + 1} attempts" if attempt else ""
        raise RewardError(f"verifier {error}{tries}")

    def _ask(self, request: Reply, ending: Ending) -> Judgement | Reply:
        """One call: what it gave, or the child's reply with its error."""
        try:
            child = self._take()
        except (RewardError, NoRoomError) as err:
            raise RewardError(f"verifier {self._function} {err}") from None
        try:
            reply = child.ask({**request, "extra": _extra(child.wants, ending)})
            return reply if "error" in reply else _judgement(child, reply)
        except NoAnswerError as err:
            named = f"{child.place}: {self._function.name}" if child.place else self._function
            raise RewardError(f"verifier {named} {err}") from None
        finally:
            self._give_back(child)

    def close(self) -> None:
        """Kill the idle children; one that is judging ends with its last judgement."""
        self._ended.set()
        with self._changed:
            self._closed = True
            idle = [child for child, calls in self._num_calls.items() if not calls]
            for child in idle:
                del self._num_calls[child]
            self._changed.notify_all()
        for child in idle:
            child.end("is closed")

    def _take(self) -> Child:
        """A child with room for one call more; another process is started if all are full."""
        with self._changed:
            while not self._closed:
                for child, calls in self._num_calls.items():
                    if not child.broken and calls < self._room(child):
                        self._num_calls[child] += 1
                        return child
                if len(self._num_calls) + self._num_starting < self._function.processes:
                    break
                self._changed.wait()
            self._num_starting += 1
        return self._start()

    def _room(self, child: Child) -> int:
        return self._function.concurrency if child.is_async else 1

    def _give_back(self, child: Child) -> None:
        with self._changed:
            self._num_calls[child] -= 1
            is_over = bool(child.broken) or (self._closed and not self._num_calls[child])
            if is_over and not self._num_calls[child]:
                del self._num_calls[child]
            self._changed.notify_all()
        if is_over:
            child.end("is closed")

    def _start(self) -> Child:
        """A new child that is taken once; `_num_starting` has counted it, or it is the first."""
        child = None
        try:
            if self._closed:
                raise RewardError("is closed")
            child = started(
                self._function.spec(), self._function.timeout_s, is_wanted=lambda: not self._closed
            )
            try:
                reply = child.begin()
            except NoAnswerError as err:
                child.end("is closed")
                raise RewardError(f"{self._function} cannot be loaded: it {err}") from None
            if "error" in reply:
                child.end("is closed")
                raise RewardError(str(reply["error"]))
        finally:
            with self._changed:
                self._num_starting = max(0, self._num_starting - 1)
                if child is not None and not child.broken:
                    self._num_calls[child] = 1
                self._changed.notify_all()
        return child


def _extra(wants: frozenset[str], ending: Ending) -> dict[str, Any]:
    """Of what there is beyond the four arguments, what the function takes."""
    known: dict[str, Any] = {
        "finish_reason": ending.finish_reason,
        "num_tokens": len(ending.token_ids),
        "token_ids": list(ending.token_ids),
        "transcript": [dict(turn) for turn in ending.transcript],
    }
    return {name: value for name, value in known.items() if name in wants}


def _judgement(child: Child, reply: Reply) -> Judgement:
    try:
        return Judgement(
            reward=float(reply["reward"]),
            parts={str(name): float(value) for name, value in reply["parts"].items()},
        )
    except (KeyError, TypeError, ValueError, AttributeError):
        child.end(NONSENSE)
        raise NoAnswerError(NONSENSE) from None
