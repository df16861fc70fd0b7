"""Program of a process that runs user code: JSON lines in, JSON lines out, paired by `id`.

Started by path with `python -P`, so it imports nothing of ours and nothing of ours is importable
under a short name. Argument: the file descriptor of a connected socket. Its first line is the spec:
`kind`, "function" or "class"; `file` or `module`; `name`; `options`, keyword arguments; `extra`,
names of parameters that can be filled in; `memory_mb`. The first answer is `{"id": 0, "error"}` or
`{"id": 0, "ready": "file:line", "is_async", "cancels", "wants": [names of extra]}`. Then

`{"id", "args", "extra"}` calls the function;
`{"id", "key", "start": args or null, "args", "extra"}` makes the class's object of that key if
`start` is there, and calls its `step`;
`{"id", "close": [keys]}` cancels their steps that are under way, and lets go of the objects, by
their `close` if they have one.

A call is answered with `{"ends": {"reward", "parts", "note"}}`, of a class also with
`{"ends": null}` or `{"says": text or [{"role", "content"}]}`; or with `{"error", "again"}`: its
text, and whether another call may fare better. Calls of an `async def` run side by side.

`{"id", "where": ID}` is answered at once, amid user code, with the `file:line` where that call is.
`{"id", "cancel": ID}` breaks the call off, if `cancels`, and is answered when it is over: an
asynchronous one is cancelled; in the plain step of an object a signal raises an exception.

Standard output is the standard error, so nothing that user code prints can be taken for an answer.
"""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import json
import math
import numbers
import os
import queue
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    import asyncio

    from rlstreams.workers.sandbox import loading
else:

    def _beside(name: str) -> Any:  # noqa: ANN401
        spec = importlib.util.spec_from_file_location(
            f"_rlstreams_{name}", Path(__file__).with_name(f"{name}.py")
        )
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    loading = _beside("loading")

Reply = dict[str, Any]

OUT_OF_MEMORY = 137  # exit status, as of a process that the kernel killed for it
MAX_REPLY_BYTES = 64 << 20
MAX_NOTE = 16_384  # characters that are kept with a sample
_MEMORY_POLL_S = 0.05
_WANTED = "a finite number, {part: number}, or (number, {part: number})"
_BREAK_OFF = signal.SIGUSR2  # alarms are left to user code


def reply_of(returned: object, place: str, *, may_say: bool) -> Reply:
    """The reply for a return value: a number, named parts, or a number and named parts of it.

    Of a mapping alone the part called `reward` is the reward; without one it is their sum. A part
    called `note` that is text is kept with the sample, for people.

    Args:
        may_say: text and messages are answers too, and None ends without a reward.
    """
    if may_say:
        if returned is None:
            return {"ends": None}
        if isinstance(returned, str):
            return {"says": returned}
        if isinstance(returned, list) or (isinstance(returned, dict) and "role" in returned):
            return _said(returned if isinstance(returned, list) else [returned], place)
    reward, parts, note = returned, dict[Any, object](), ""
    if isinstance(returned, dict):
        parts = dict(returned)
    elif isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[1], dict):
        reward, parts = returned[0], dict(returned[1])
    if isinstance(parts.get("note"), str):
        note = str(parts.pop("note"))[:MAX_NOTE]
    if parts and isinstance(returned, dict):
        reals = [value for value in parts.values() if isinstance(value, numbers.Real)]
        reward = parts.pop("reward") if "reward" in parts else math.fsum(reals)
    values: dict[str, float] = {}
    for name, value in (*parts.items(), ("", reward)):
        if not isinstance(value, numbers.Real) or not math.isfinite(value):
            what = f"part {name!r} is" if name else "returned"
            more = ", to end; text or messages to go on; None to be judged" if may_say else ""
            more = "; it must `return` one on every path" if returned is None else more
            of = f"of type {type(value).__name__}; wanted {_WANTED}{more}"
            return {"error": f"{place} {what} {value!r:.80} {of}"}
        values[str(name)] = float(value)
    return {"ends": {"reward": values.pop(""), "parts": values, "note": note}}


def _said(messages: list[Any], place: str) -> Reply:
    texts = [m.get(n) for m in messages if isinstance(m, dict) for n in ("role", "content")]
    if messages and len(texts) == 2 * len(messages) and all(isinstance(t, str) for t in texts):
        return {"says": messages}
    wanted = 'a list that is not of messages {"role": text, "content": text}'
    return {"error": f"{place} returned {wanted}"}


def limit_memory(memory_mb: int, *, by_kernel: bool = sys.platform == "linux") -> None:
    """Let this process have no more than `memory_mb` of memory; 0: no limit.

    On Linux an allocation beyond it fails (RLIMIT_DATA counts private writable memory, so a
    library that only reserves addresses costs nothing). Elsewhere no limit of the kernel's holds,
    so a thread watches the peak and ends the process.
    """
    size = memory_mb << 20
    if not size:
        return
    if by_kernel:
        resource.setrlimit(resource.RLIMIT_DATA, (size, size))
    else:
        threading.Thread(target=_watch_memory, args=(size,), name="memory", daemon=True).start()


def _watch_memory(size: int) -> NoReturn:
    unit = 1 if sys.platform == "darwin" else 1024  # of ru_maxrss, bytes
    while resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit <= size:
        time.sleep(_MEMORY_POLL_S)
    os._exit(OUT_OF_MEMORY)


class Code:
    """The user's code, loaded: a function, or a class and the objects that are in use.

    Raises:
        UnusableError: it cannot be called as wanted.
        Exception: whatever it raises while it is loaded.
    """

    def __init__(self, spec: Mapping[str, Any]) -> None:
        self._made: Any
        self._made, self.file = loading.load(spec)
        inner: Any = None
        if "inner" in spec:  # our function, which is given the user's
            inner, self.file = loading.load({**spec, **spec["inner"]})
            spec = {**spec, "options": {**spec["options"], "inner": inner}}
        self._spec = spec
        self.is_class = spec["kind"] == "class"
        check = loading.checked_class if self.is_class else loading.checked_function
        self.wants = check(self._made, spec, self.file)
        called = self._made.step if self.is_class else self._made
        self.place = loading.place_of(inner or called, self.file)
        self.is_async = loading.is_asynchronous(called)
        self._objects: dict[str, Any] = {}
        self._steps: dict[str, asyncio.Task[Any]] = {}  # asynchronous ones under way

    async def answer(self, request: Reply) -> Reply:
        """The reply to a request; whatever the user's code raises becomes one."""
        try:
            if "close" in request:
                return await self._close(request["close"])
            returned = await self._called(request)
        except Exception as err:  # noqa: BLE001  (the border to user code: answered, never dropped)
            return self._raised(err)
        try:
            return reply_of(returned, self.place, may_say=self.is_class)
        except Exception as err:  # noqa: BLE001  (a value's own methods, or an integer beyond float64)
            of = f"{type(returned).__name__} that is no number ({type(err).__name__}: {err})"
            return {"error": f"{self.place} returned a value of type {of}; wanted {_WANTED}"}

    def answer_plain(self, request: Reply) -> Reply:
        """The same, without a loop where nothing is to be awaited."""
        coroutine = self.answer(request)
        try:
            coroutine.send(None)
        except StopIteration as stop:
            reply: Reply = stop.value
            return reply
        coroutine.close()
        return {"error": f"{self.place} awaits something, but is no `async def`"}

    async def _called(self, request: Reply) -> object:
        key = request.get("key", "")
        if self.is_class:
            if request["start"] is not None:
                self._objects[key] = None  # also where it cannot be made
                self._objects[key] = self._made(*request["start"], **self._spec["options"])
            value = self._objects[key].step(*request["args"], **request["extra"])
        else:
            value = self._made(*request["args"], **self._spec["options"], **request["extra"])
        if not inspect.isawaitable(value):
            return value
        if self.is_class and self.is_async:
            import asyncio  # late: a plain class needs none

            task = asyncio.current_task()
            assert task is not None
            self._steps[key] = task
        try:
            return await value
        finally:
            self._steps.pop(key, None)

    async def _close(self, keys: list[str]) -> Reply:
        errors = []
        for key in keys:
            if (step := self._steps.get(key)) is not None:
                import asyncio  # late, as above

                step.cancel()
                await asyncio.wait([step])
            close = getattr(self._objects.pop(key, None), "close", None)
            try:
                closed = close() if callable(close) else None
                if inspect.isawaitable(closed):
                    await closed
            except Exception as err:  # noqa: BLE001  (reported when all are closed)
                errors.append(self._raised(err)["error"])
        return {"error": "; ".join(errors)} if errors else {}

    def _raised(self, err: Exception) -> Reply:
        named = f"{self._spec['name']} raised {type(err).__name__}: {err}"
        is_final = bool(getattr(err, "final", False))
        return {"error": f"{loading.where(err, self.file)}: {named}", "again": not is_final}


class WorkerLink:
    """The socket to the worker. When it closes the worker is gone: end, even amid user code."""

    def __init__(self, fd: int) -> None:
        self._socket = socket.socket(fileno=fd)
        self._lines = self._socket.makefile("rb")
        self._lock = threading.Lock()
        self.spec: Reply = json.loads(self._lines.readline())
        self.requests: queue.SimpleQueue[Reply] = queue.SimpleQueue()
        self.take: Callable[[Reply], object] = self.requests.put  # a request, on the link's thread
        self.tasks: dict[int, asyncio.Task[Reply]] = {}  # asynchronous calls under way
        threading.Thread(target=self._read, name="worker-watch", daemon=True).start()

    def send(self, number: int, reply: Reply, place: str = "") -> None:
        """Answer a request; with an error if the reply cannot be sent."""
        error = ""
        try:
            line = json.dumps({"id": number, **reply}).encode()
        except (TypeError, ValueError, RecursionError) as err:
            error = f"{place} returned what is not JSON: {err}"
        else:
            if len(line) > MAX_REPLY_BYTES:
                error = f"{place} returned {len(line):,} bytes; the limit is {MAX_REPLY_BYTES:,}"
        if error:
            line = json.dumps({"id": number, "error": error}).encode()
        # Where the worker is gone, the thread of the link ends this process.
        with self._lock, contextlib.suppress(OSError):
            self._socket.sendall(line + b"\n")

    def _read(self) -> None:
        try:
            for line in self._lines:
                request = json.loads(line)
                if "where" in request:
                    place = self._place_of_task(request["where"]) or _busy_at(self.spec["file"])
                    self.send(request["id"], {"where": place})
                else:
                    self.take(request)
        finally:  # also out of memory: nobody could reach this process any more
            os._exit(0)  # its reaper ends what it started

    def _place_of_task(self, number: int) -> str:
        """`file:line` where an asynchronous call waits; empty if there is none, or it is busy."""
        task = self.tasks.get(number)
        coroutine: Any = task.get_coro() if task is not None else None
        found, file = "", self.spec["file"]
        while (frame := getattr(coroutine, "cr_frame", None)) is not None:
            if frame.f_code.co_filename == file:
                found = f"{file}:{frame.f_lineno}"
            coroutine = coroutine.cr_await
        return found


def _busy_at(file: str) -> str:
    """`file:line` of what the main thread is doing, in the user's file if it is there."""
    frame: FrameType | None = sys._current_frames().get(threading.main_thread().ident or 0)
    innermost = frame
    while frame is not None and frame.f_code.co_filename != file:
        frame = frame.f_back
    found = frame or innermost
    return f"{found.f_code.co_filename}:{found.f_lineno}" if found else ""


class BrokenOff(BaseException):
    """Raised amid a plain step that has missed its deadline."""


def serve(link: WorkerLink, code: Code, ready: Reply) -> NoReturn:
    """Answer one request after the other in the main thread; the link ends the process.

    Objects stay in the thread that made them, which some libraries want. A signal breaks off
    a wait there (for a sleep, a socket, a lock, a process) and any loop of Python.
    """
    under_way, to_break = -1, 0  # numbers of calls

    def take(request: Reply) -> None:
        nonlocal to_break
        link.requests.put(request)
        if "cancel" in request:
            to_break = request["cancel"]
            signal.pthread_kill(threading.main_thread().ident or 0, _BREAK_OFF)

    def break_off(*_: object) -> None:
        nonlocal under_way
        if under_way == to_break:
            under_way = -1
            raise BrokenOff

    if code.is_class:
        signal.signal(_BREAK_OFF, break_off)
        link.take = take
    link.send(0, ready)
    while True:
        request = link.requests.get()
        number = request["id"]
        if "cancel" in request:  # it stands behind what it breaks off, which is over by now
            link.send(number, {})
            continue
        try:
            under_way = number
            reply = code.answer_plain(request)
            under_way = -1  # in the `try`: nothing is raised from here on
        except BrokenOff:
            reply = {"error": "was broken off"}  # nobody waits for it
        link.send(number, reply, code.place)


async def serve_async(link: WorkerLink, code: Code, ready: Reply) -> None:
    """Answer requests side by side, for ever; the link ends the process."""
    import asyncio

    loop = asyncio.get_running_loop()

    def begin(request: Reply) -> None:
        number = request["id"]
        if "cancel" not in request:
            task = link.tasks[number] = loop.create_task(code.answer(request))
            task.add_done_callback(lambda task: end(number, task))
        elif (under_way := link.tasks.get(request["cancel"])) is not None:
            under_way.add_done_callback(lambda _: link.send(number, {}))
            under_way.cancel()
        else:
            link.send(number, {})

    def end(number: int, task: asyncio.Task[Reply]) -> None:
        del link.tasks[number]
        if task.cancelled():
            link.send(number, {"error": f"{code.place} was cancelled"})
        elif task.exception() is None:  # else of SystemExit and the like: the process ends of it
            link.send(number, task.result(), code.place)

    link.take = lambda request: loop.call_soon_threadsafe(begin, request)
    link.send(0, ready)
    await loop.create_future()


def main(fd: int) -> None:
    """Load, say so, then answer until the worker closes the link."""
    link = WorkerLink(fd)
    try:
        limit_memory(link.spec["memory_mb"])
        code = Code(link.spec)
    except loading.UnusableError as err:
        return link.send(0, {"error": str(err)})
    except Exception as err:  # noqa: BLE001  (the border to user code: answered, never dropped)
        return link.send(0, {"error": loading.load_error(err, link.spec["file"])})
    link.spec["file"] = code.file
    ready = {
        "ready": code.place,
        "is_async": code.is_async,
        "cancels": code.is_async or code.is_class,
        "wants": code.wants,
    }
    if not code.is_async:
        serve(link, code, ready)
    import asyncio  # late: it doubles a start

    asyncio.run(serve_async(link, code, ready))


if __name__ == "__main__":
    main(int(sys.argv[1]))
