"""One process of user code as the worker sees it: calls go out, replies come back by number.

Lives on the event loop of its `Sandbox`. `program.py` describes the lines.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlstreams.streams.log.secrets import withheld
from rlstreams.streams.process.child import Child, Orphaned
from rlstreams.streams.process.keeper import Ended, Keeper, Limits
from rlstreams.streams.process.priority import COMPUTES
from rlstreams.workers.sandbox.program import MAX_REPLY_BYTES, OUT_OF_MEMORY
from rlstreams.workers.sandbox.user_code import (
    LostCallError,
    SuspectCallError,
    UserCode,
    UserCodeError,
)

NUM_TRIES, PAUSE_S = 10, 1.0  # to start a process where the system has no room for one
START_S = 60.0  # a user's file may import a large library
NUM_KILLS = 3  # of processes that load the code, until the code, or its memory, is to blame
WHERE_S = 0.5
CANCEL_S = 5.0  # until a call that has missed its deadline must have let go
EXIT_S, _POLL_S = 1.0, 0.01  # from the end of the link to the process's
PRINTED_BYTES = 1 << 20  # of a process that are passed on in a minute
_LEFT_OUT = b"\n(user code printed more than a megabyte: the rest of this minute is left out)\n"
_TAIL = 200  # characters of what it printed last
_READY = 0  # number of the first reply, which answers no call
_PROGRAM = Path(__file__).with_name("program.py")

Reply = dict[str, Any]


@dataclass(slots=True, eq=False)
class _Call:
    number: int
    reply: asyncio.Future[Reply]
    runs_code: bool = True  # else it only asks about another call
    was_alone: bool = True  # in its process, all the time


class _Output(asyncio.Protocol):
    """Output of user code: passed on to the worker's standard error, the end of it kept.

    Of a minute in which there is more than `PRINTED_BYTES` of it, the rest is left out: ten
    megabytes an answer would fill the disk that the run's log is on.
    """

    def __init__(self) -> None:
        self.tail = b""
        self._minute, self._printed = -1, 0  # bytes, in this minute

    def data_received(self, data: bytes) -> None:
        minute = int(time.monotonic() // 60)
        if minute != self._minute:
            self._minute, self._printed = minute, 0
        passed = data[: max(0, PRINTED_BYTES - self._printed)]
        if self._printed <= PRINTED_BYTES < self._printed + len(data):
            passed += _LEFT_OUT
        self._printed += len(data)
        with contextlib.suppress(OSError):
            os.write(2, passed)
        self.tail = (self.tail + data)[-4 * _TAIL :]


class Process:
    """A process that has user code loaded; made by `started`."""

    def __init__(self, code: UserCode) -> None:
        self._code = code
        self.timeout_s = code.timeout_s
        self.broken = ""
        """Why it answers no more; empty: it does."""
        self.place = ""
        """`file:line` of the code, once it is loaded."""
        self.open: set[str] = set()
        """Keys of the calls and objects that are placed here."""
        self.is_async = False
        self.wants: frozenset[str] = frozenset()
        """Names of `code.extra` that it takes."""
        self._cancels = False  # a call that hangs can be broken off
        self.room = 1
        """Calls at a time."""
        self._has_room = asyncio.Semaphore(1)
        self._numbers = itertools.count(_READY)
        self._sent = _READY
        self._calls: dict[int, _Call] = {}
        self._ready = self._awaited(runs_code=False)
        self._ending: asyncio.Task[None] | None = None
        self._was_killed = False

    @classmethod
    async def started(cls, code: UserCode) -> Process:
        """A process with the code loaded; tried for again where the system has no room for one, or
        where somebody kills it meanwhile.

        Raises:
            LostCallError: there was no room `NUM_TRIES` times, `PAUSE_S` apart; says what lacked.
            UserCodeError: the code cannot be loaded, or was killed `NUM_KILLS` times as it was.
        """
        # Room comes back when something else ends, no sooner for a longer pause.
        starts = Keeper(Limits(failures=NUM_TRIES, first_s=PAUSE_S, longest_s=PAUSE_S))
        num_kills = 0
        while True:
            self = cls(code)
            try:
                await self._launch()
            except OSError as err:
                verdict = starts.ended(Ended.FAILED, time.monotonic())
                if verdict.is_over:
                    raise LostCallError(
                        f"{code} has no process: in {verdict.failures} tries, {PAUSE_S:g} s apart, "
                        f"none could be started: {err}"
                    ) from None
                await asyncio.sleep(verdict.delay_s)
                continue
            try:
                await self._load()
            except BaseException as err:
                num_kills += self._was_killed  # by others: our own kill is below
                await self.end("is closed")
                if not (isinstance(err, UserCodeError) and 0 < num_kills < NUM_KILLS):
                    raise
            else:
                return self

    async def call(self, request: Mapping[str, Any], *, needs_room: bool = True) -> Reply:
        """Send a call once there is room for it; the reply, within the code's `timeout_s`.

        A call that misses its deadline is broken off where that is possible; one that does not let
        go ends the process, and with it all else that it held. A caller that gives up waiting
        leaves the call's room taken until it is over.

        Raises:
            LostCallError: the process ended because of another call, or before this was sent.
            SuspectCallError: it ended because of one of several calls, this one among them.
            UserCodeError: the call hangs, says where; or it ended the process, says how it died.
        """
        if needs_room:
            await self._has_room.acquire()
        task = asyncio.get_running_loop().create_task(self._ask(request, self.timeout_s))

        def end(task: asyncio.Task[Reply]) -> None:
            if needs_room:
                self._has_room.release()
            if not task.cancelled():
                task.exception()  # seen: nobody may wait for it any more

        task.add_done_callback(end)
        return await asyncio.shield(task)

    async def end(self, reason: str) -> None:
        """Kill it and all that it started; calls that wait for it fail with `reason`."""
        self._break(reason, is_ended=True)
        if self._ending is None:  # only once: later its number may be another process's
            self._ending = asyncio.get_running_loop().create_task(self._kill())
        await asyncio.shield(self._ending)

    @property
    def is_over(self) -> bool:
        """Whether its end is complete: killed, awaited and closed."""
        return self._ending is not None and self._ending.done()

    async def _kill(self) -> None:
        self._child.kill()
        self._writer.close()
        await self._exited(START_S)
        self._output.close()

    async def last_call(self, request: Mapping[str, Any], timeout_s: float) -> None:
        """A call whose deadline ends the process; its outcome counts no more."""
        with contextlib.suppress(UserCodeError):
            await asyncio.wait({self._send(request).reply}, timeout=timeout_s)

    async def _launch(self) -> None:
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-P", str(_PROGRAM), str(theirs.fileno())]
        with contextlib.ExitStack() as stack:
            stack.enter_context(theirs)
            stack.callback(ours.close)
            # Milliseconds, on its own loop. Whatever it starts ends with it, and with this worker.
            self._child = Child.started(
                command, orphaned=Orphaned.DIES, pass_fds=[theirs.fileno()], without=withheld(),
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, gives_way=COMPUTES,
            )  # fmt: skip
            stack.callback(self._child.end)
            reader, self._writer = await asyncio.open_connection(
                sock=ours, limit=2 * MAX_REPLY_BYTES
            )
            stack.callback(self._writer.close)
            self._output, self._printed = await asyncio.get_running_loop().connect_read_pipe(
                _Output, self._child.stdout
            )
            stack.pop_all()
            theirs.close()
        # Not as an argument: it may hold secrets, and those are for all to see.
        self._writer.write(self._code.spec().encode() + b"\n")
        self._reading = asyncio.get_running_loop().create_task(self._read(reader))

    async def _load(self) -> None:
        done, _ = await asyncio.wait({self._ready.reply}, timeout=START_S)
        if self.broken or not done:
            late = f"gave no answer within {START_S:g} s"
            why = self.broken or f"{late}{await self._whereabouts(_READY)}"
            raise UserCodeError(f"{self._code} cannot be loaded: it {why}")
        reply = self._ready.reply.result()
        if "error" in reply:
            raise UserCodeError(str(reply["error"]))
        self.place = str(reply["ready"])
        self.is_async, self._cancels = bool(reply["is_async"]), bool(reply["cancels"])
        self.wants = frozenset(reply["wants"])
        self.room = self._code.concurrency if self.is_async else 1
        self._has_room = asyncio.Semaphore(self.room)

    async def _ask(self, request: Mapping[str, Any], timeout_s: float) -> Reply:
        call = self._send(request)
        await asyncio.wait({call.reply}, timeout=timeout_s)
        if call.reply.done():
            return call.reply.result()
        why = f"gave no answer within {timeout_s:g} s{await self._whereabouts(call.number)}"
        if not (self._cancels and await self._probe({"cancel": call.number}, CANCEL_S)):
            await self.end(f"was ended because another call {why} and did not let go")
        raise self._error(UserCodeError, why)

    def _send(self, request: Mapping[str, Any], *, runs_code: bool = True) -> _Call:
        if self.broken:
            raise self._error(LostCallError, self.broken)
        call = self._awaited(runs_code=runs_code)
        self._writer.write(json.dumps({"id": call.number, **request}).encode() + b"\n")
        return call

    def _awaited(self, *, runs_code: bool) -> _Call:
        reply: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        # Seen, also where nobody waits any more.
        reply.add_done_callback(lambda reply: reply.cancelled() or reply.exception())
        call = _Call(next(self._numbers), reply, runs_code)
        if runs_code:
            for other in [other for other in self._calls.values() if other.runs_code]:
                call.was_alone = other.was_alone = False
        self._calls[call.number] = call
        self._sent = call.number
        return call

    async def _whereabouts(self, number: int) -> str:
        """`: it is at file:line` while it can say; a call deep in a library cannot."""
        place = (await self._probe({"where": number}, WHERE_S)).get("where")
        return f": it is at {place}" if place else ""

    async def _probe(self, request: Mapping[str, Any], timeout_s: float) -> Reply:
        """The reply to a question about another call; empty: there is none in time."""
        with contextlib.suppress(UserCodeError):
            call = self._send(request, runs_code=False)
            await asyncio.wait({call.reply}, timeout=timeout_s)
            if call.reply.done():
                return call.reply.result()
        return {}

    async def _read(self, reader: asyncio.StreamReader) -> None:
        """Hand out replies until the link closes."""
        reason = ""
        try:
            while line := await reader.readline():
                self._hand_out(json.loads(line))
        except (ValueError, KeyError, TypeError):
            reason = "sent what is no answer: user code has written to the link of its process"
        except OSError:
            pass
        self._break(reason or await self._death())
        await self.end(self.broken)

    def _hand_out(self, reply: Reply) -> None:
        number = reply["id"]
        call = self._calls.pop(number, None)
        if call is not None:
            if not call.reply.done():
                call.reply.set_result(reply)
        elif type(number) is not int or not _READY <= number <= self._sent:
            raise ValueError(number)

    def _break(self, reason: str, *, is_ended: bool = False) -> None:
        self.broken = self.broken or reason
        calls, self._calls = self._calls, {}
        for call in calls.values():
            kind = UserCodeError if call.was_alone else SuspectCallError
            if not call.reply.done():
                kind = LostCallError if is_ended else kind
                call.reply.set_exception(self._error(kind, self.broken))

    def _error(self, kind: type[UserCodeError], reason: str) -> UserCodeError:
        called = self._code.name if self._code.kind == "function" else "step"
        return kind(f"{self.place}: {called} {reason}")

    async def _death(self) -> str:
        status = await self._exited(EXIT_S)
        self._was_killed = status == -signal.SIGKILL
        if status is None:
            return "closed its link"
        if status == OUT_OF_MEMORY and self._code.memory_mb:
            return f"needs more than memory_mb = {self._code.memory_mb}"
        died = f"of {signal.Signals(-status).name}" if status < 0 else f"with status {status}"
        await asyncio.sleep(_POLL_S)  # its last words may be read later than its end
        lines = self._printed.tail.decode(errors="replace").strip()[-_TAIL:]
        return f"died {died}" + (f"; it last printed: {lines}" if lines else "")

    async def _exited(self, within_s: float) -> int | None:
        """The process's status; None: it runs on."""
        for _ in range(round(within_s / _POLL_S)):
            if self._child.poll() is not None:
                break
            await asyncio.sleep(_POLL_S)
        return self._child.poll()
