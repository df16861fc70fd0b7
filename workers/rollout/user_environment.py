"""The worker's side of an environment class: each episode lives in one of a few child processes.

An episode stays in the process where it began. A step that misses its deadline or raises costs its
own sample. A process that ends takes all its episodes along: the sample whose step was alone in it
is to blame, the others are attempted again from their prompts. The wire is described in
`environment_process.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlstreams.schemas.events import Prompt
from rlstreams.streams.log.errors import ConfigError, DeadlineError
from rlstreams.workers.config.nearest import meant_path
from rlstreams.workers.rollout.environment import (
    Ends,
    EpisodeError,
    LostEpisodeError,
    PolicyTurn,
    Says,
    SuspectEpisodeError,
)
from rlstreams.workers.rollout.reward import Judgement, check_judgement
from rlstreams.workers.rollout.user_verifier import Function
from rlstreams.workers.rollout.verifier_child import (
    Child,
    GoneError,
    LateError,
    NoAnswerError,
    NoRoomError,
    Reply,
    started,
)

PATIENCE_S = 10.0  # for one more process, while others could take the episode
RETRY_S = 60.0  # from a start of one more that failed to the next
CLOSE_S = 5.0  # at the end of a worker, for all that is open in one process
_PROGRAM = Path(__file__).with_name("environment_process.py")


@dataclass(slots=True, eq=False)
class _Call:
    was_alone: bool  # in its process, all the time


class _Home:
    """A process, the episodes that live in it, and room for its calls."""

    def __init__(self, child: Child, room: int) -> None:
        self.child = child
        self.open: set[str] = set()
        self._room = asyncio.Semaphore(room)
        self._calls: set[_Call] = set()  # under way

    async def ask(
        self, pool: ThreadPoolExecutor, request: Reply, *, needs_room: bool = True
    ) -> Reply:
        """The reply, as `Child.ask`; whoever gives up waiting leaves the call's room taken.

        Raises:
            LateError: it hangs.
            LostEpisodeError: the process ended of another call, maybe while this one waited for
                room.
            SuspectEpisodeError: the process ended of one of several calls, this one among them.
            NoAnswerError: it ended of this call.
        """
        if needs_room:
            await self._room.acquire()
        call = _Call(was_alone=not self._calls)
        for other in self._calls:
            other.was_alone = False
        self._calls.add(call)

        def end(reply: asyncio.Future[Reply]) -> None:
            self._calls.discard(call)
            if needs_room:
                self._room.release()
            if not reply.cancelled():
                reply.exception()  # seen: nobody may wait for it any more

        # A pool that is shut down raises: its worker ends.
        reply = asyncio.get_running_loop().run_in_executor(pool, self.child.ask, request)
        reply.add_done_callback(end)
        try:
            return await asyncio.shield(reply)
        except LateError:
            raise
        except GoneError as err:
            raise LostEpisodeError(str(err)) from None
        except NoAnswerError as err:
            if call.was_alone:
                raise
            raise SuspectEpisodeError(str(err)) from None


class UserEnvironment:
    """Episodes of a user's class.

    Raises:
        ConfigError: from the constructor, if the class cannot be loaded.
        DeadlineError: from the constructor, if the system has no process for it.
    """

    def __init__(
        self,
        code: Function,
        *,
        must_reward: bool = False,
        note: Callable[[str], None] = lambda _: None,
        patience_s: float = PATIENCE_S,
    ) -> None:
        """Start the first process; others follow as episodes need them.

        Args:
            must_reward: None ends no episode: there is no verifier to judge it.
            note: told what went wrong beside samples, or after they were over, for the log.
            patience_s: how long a start of one more process holds up episodes.
        """
        self.code = code
        self.must_reward = must_reward
        self.note = note
        if code.file and not Path(code.file).is_file():
            raise ConfigError(
                f"environment.name: there is no file {code.file}{meant_path(code.file)}"
            )
        room = code.processes * (code.concurrency + 1)
        self.pool = ThreadPoolExecutor(max_workers=room, thread_name_prefix="environment")
        self._is_closed = False
        self._changing = threading.Lock()  # held to add a home, and to close
        self._homes: list[_Home] = []
        self._loading: Child | None = None
        self._starting: asyncio.Task[EpisodeError | None] | None = None
        self._started_s = self._retry_s = 0.0  # monotonic
        self.patience_s = patience_s
        self._leaving: set[asyncio.Task[None]] = set()
        self._numbers = itertools.count()
        try:
            self._start()
        except LostEpisodeError as err:
            self.pool.shutdown(wait=False)
            raise DeadlineError(str(err)) from None
        except EpisodeError as err:
            self.pool.shutdown(wait=False)
            raise ConfigError(f"environment.name: {err}") from err

    def begin(self, name: str, prompt: Prompt) -> UserEpisode:
        """See `Environment.begin`; a sample that comes back is not taken for the one that left."""
        return UserEpisode(self, f"{name}#{next(self._numbers)}", prompt)

    async def home(self, name: str) -> _Home:
        """A process for one episode more: a new one as long as all have some and more may run.

        Raises:
            LostEpisodeError: none is left, and the system has no room for one.
            EpisodeError: none is left, and none can be started.
        """
        while self._wants_another():
            if self._starting is None or self._starting.done():
                self._started_s = time.monotonic()
                self._starting = asyncio.get_running_loop().create_task(self._start_another())
            waited_s = time.monotonic() - self._started_s
            patience_s = max(0.0, self.patience_s - waited_s) if self._homes else None
            # Whoever gives up here leaves the start alone: it is everybody's.
            done, _ = await asyncio.wait({self._starting}, timeout=patience_s)
            if not done and self._homes:
                break
            error = self._starting.result() if done else None
            if error is not None and not self._homes:
                raise type(error)(str(error))
        home = min(self._homes, key=lambda home: len(home.open))
        home.open.add(name)
        return home

    def _wants_another(self) -> bool:
        for home in [home for home in self._homes if home.child.broken]:
            self._homes.remove(home)
            asyncio.get_running_loop().run_in_executor(self.pool, home.child.end, "is closed")
        if not self._homes:
            return True
        is_full = all(home.open for home in self._homes)
        may_start = len(self._homes) < self.code.processes and time.monotonic() >= self._retry_s
        return is_full and may_start

    async def _start_another(self) -> EpisodeError | None:
        """The error, if it cannot be started; then the next try is after a while."""
        try:
            await asyncio.get_running_loop().run_in_executor(self.pool, self._start)
        except EpisodeError as err:
            self._retry_s = time.monotonic() + RETRY_S
            self.note(f"environment: one more process cannot be started: {err}")
            return err
        return None

    def leave(self, home: _Home, name: str) -> None:
        """Have an episode closed behind its step, which is cancelled if it is asynchronous."""
        if not self._is_closed and not home.child.broken:
            task = asyncio.get_running_loop().create_task(self._leave(home, name))
            self._leaving.add(task)
            task.add_done_callback(self._leaving.discard)

    async def _leave(self, home: _Home, name: str) -> None:
        try:
            # An asynchronous step ends by this, so it is not waited for; a plain one is.
            needs_room = not home.child.is_async
            reply = await home.ask(self.pool, {"close": [name]}, needs_room=needs_room)
            if "error" in reply:
                self.note(f"closing {name}: {reply['error']}")
        except (NoAnswerError, LostEpisodeError) as err:
            self.note(f"closing {name}: environment {self.code} {err}")
        finally:
            home.open.discard(name)

    def close(self) -> None:
        """Close what is open, each process within `CLOSE_S`, and end them."""
        with self._changing:
            if self._is_closed:
                return
            self._is_closed = True
            loading = self._loading
        if loading is not None:
            loading.end("is closed")
        for home in self._homes:
            if home.open and not home.child.broken:
                with contextlib.suppress(NoAnswerError):  # it ends now, one way or the other
                    home.child.ask({"close": sorted(home.open)}, CLOSE_S)
            home.child.end("is closed")
        self.pool.shutdown(wait=False, cancel_futures=True)

    def _start(self) -> None:
        """One more home; one that is ready too late is closed."""
        code = self.code
        try:
            child = started(
                code.spec(), code.timeout_s, _PROGRAM, is_wanted=lambda: not self._is_closed
            )
        except NoRoomError as err:
            raise LostEpisodeError(f"environment {code} {err}") from None
        self._loading = child
        try:
            reply = {"error": "is closed"} if self._is_closed else child.begin()
        except NoAnswerError as err:
            child.end("is closed")
            raise EpisodeError(f"{code} cannot be loaded: it {err}") from None
        finally:
            self._loading = None
        with self._changing:
            is_held = "error" not in reply and not self._is_closed
            if is_held:
                self._homes.append(_Home(child, code.concurrency if child.is_async else 1))
        if not is_held:
            child.end("is closed")
            raise EpisodeError(str(reply.get("error", "is closed")))


class UserEpisode:
    """One object of the user's class, from the first step on."""

    def __init__(self, environment: UserEnvironment, name: str, prompt: Prompt) -> None:
        self._environment = environment
        self._name = name
        self._prompt = prompt
        self._home: _Home | None = None

    async def step(self, turn: PolicyTurn) -> Says | Ends:
        """See `Episode.step`."""
        environment, start = self._environment, None
        home = self._home
        if home is None:
            home = self._home = await environment.home(self._name)
            prompt = self._prompt
            metadata = json.loads(prompt.metadata or "{}")
            start = {"prompt": prompt.text, "answer": prompt.answer, "metadata": metadata}
        request = {
            "step": self._name,
            "start": start,
            "completion": turn.text,
            "extra": _extra(home.child.wants, turn),
        }
        reply = await self._reply(home, request)
        if "error" in reply:
            raise EpisodeError(f"environment {reply['error']}")
        return self._outcome(home, reply)

    def leave(self) -> None:
        """See `Episode.leave`."""
        home, self._home = self._home, None
        if home is not None:
            self._environment.leave(home, self._name)

    async def _reply(self, home: _Home, request: Reply) -> Reply:
        environment = self._environment
        named = f"{home.child.place}: step"
        if home.child.broken:
            raise LostEpisodeError(f"environment {environment.code} {home.child.broken}")
        try:
            return await home.ask(environment.pool, request)
        except LostEpisodeError as err:
            raise type(err)(f"environment {named} {err}") from None
        except NoAnswerError as err:
            raise EpisodeError(f"environment {named} {err}") from None

    def _outcome(self, home: _Home, reply: Reply) -> Says | Ends:
        try:
            if "says" in reply:
                return Says(reply["says"])
            ends = reply["ends"]
            if ends is not None:
                judged = Judgement(reward=float(ends["reward"]), parts=dict(ends["parts"]))
                check_judgement(judged)
                return Ends(judged)
        except (KeyError, TypeError) as err:
            raise EpisodeError(f"environment {self._environment.code} sent {err!r}") from None
        except ValueError as err:
            raise EpisodeError(f"environment {home.child.place}: {err}") from None
        if self._environment.must_reward:
            raise EpisodeError(
                f"environment {home.child.place}: step returned None, and reward.verifier is "
                "`environment`: return a number to end, or name a verifier"
            )
        return Ends(None)


def _extra(wants: frozenset[str], turn: PolicyTurn) -> dict[str, Any]:
    known: dict[str, Any] = {
        "turn": turn.number,
        "is_last": turn.is_last,
        "num_tokens": len(turn.token_ids),
        "token_ids": list(turn.token_ids),
        "raw": turn.raw,
    }
    return {name: value for name, value in known.items() if name in wants}
