"""The child process that runs a reward function: JSON lines in, JSON lines out, paired by `id`.

Started by path with `python -P`, so it imports nothing of ours and nothing of ours is importable
under a short name. Argument: the file descriptor of a connected socket; on stdin, a JSON object of
`file` or `module`, `function`, `options` (keyword arguments for it) and `memory_mb`. First it says
`{"id": 0, "ready": "file:line", "is_async": bool, "wants": [name]}` or `{"id": 0, "error": ...}`.
Then it answers each request, an object of `id`, `prompt`, `completion`, `answer`, `metadata` and
`extra` (those of `wants`), with `{"id": .., "reward": number, "parts": {name: number}}` or
`{"id": .., "error": text, "again": bool}` (whether another call may fare better): one after the
other, or, of an `async def`, as each is done.

`{"id": .., "where": ID}` is answered at once, amid user code, with `{"where": "file:line"}` of what
that request is doing. `{"id": .., "cancel": ID}` is answered when an asynchronous one has ended.

Standard output is the worker's standard error, so nothing that user code prints can be taken for
an answer.
"""

from __future__ import annotations

import importlib.util
import inspect
import json
import math
import numbers
import os
import queue
import resource
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Coroutine
from functools import cache
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    import asyncio

    from rlstreams.workers.rollout import descendants, named_code
else:

    def _beside(name: str) -> Any:  # noqa: ANN401
        spec = importlib.util.spec_from_file_location(
            f"_rlstreams_{name}", Path(__file__).with_name(f"{name}.py")
        )
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    descendants, named_code = _beside("descendants"), _beside("named_code")

UnusableError = named_code.UnusableError
Reply = dict[str, Any]

WANTED = "(prompt, completion, answer, metadata)"
# For a function that has such parameters.
EXTRA = ("finish_reason", "num_tokens", "token_ids", "transcript")
OUT_OF_MEMORY = 137  # exit status, as of a process that the kernel killed for it
_MEMORY_POLL_S = 0.05


def place_of(function: Callable[..., object], file: str) -> str:
    """`file:line` of the function's definition, as far as that is known."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code else file


def where(error: BaseException, file: str) -> str:
    """`file:line` of the innermost frame in the user's file, or of the innermost at all."""
    if isinstance(error, SyntaxError) and error.filename is not None:
        return f"{error.filename}:{error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if frame.filename == file]
    innermost = (own or list(frames))[-1]
    return f"{innermost.filename}:{innermost.lineno}"


def reply_of(returned: object, place: str) -> Reply:
    """What the function returned: a number, named parts, or a number and named parts of it.

    Of a mapping alone the part called `reward` is the reward; without one it is their sum.
    """
    reward = returned
    parts: dict[Any, object] = {}
    if isinstance(returned, dict) and returned:
        parts = dict(returned)
        reward = parts.pop("reward", None) if "reward" in parts else _sum(parts)
    elif isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[1], dict):
        reward, parts = returned
    values: dict[str, float] = {}
    for name, value in (*parts.items(), ("", reward)):
        if not isinstance(value, numbers.Real) or not math.isfinite(value):
            what = f"part {name!r} is" if name else "returned"
            return {
                "error": f"{place} {what} {_brief(value)}; wanted a finite number, "
                "{part: number}, or (number, {part: number})"
            }
        values[str(name)] = float(value)
    return {"reward": values.pop(""), "parts": values}


def extra_wanted(function: Callable[..., object], options: Reply) -> list[str]:
    """Which of `EXTRA` the function has parameters for, beyond the four and its options."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except ValueError:
        return []
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    names = [p.name for i, p in enumerate(parameters) if p.kind in by_name and i >= 4]
    return [name for name in EXTRA if name in names and name not in options]


def is_asynchronous(function: Callable[..., object]) -> bool:
    """Whether a call gives a coroutine; of an object the method decides."""
    found = inspect.unwrap(function)
    return inspect.iscoroutinefunction(found) or inspect.iscoroutinefunction(
        getattr(found, "__call__", None)  # noqa: B004  (the method is wanted, not whether)
    )


def call(function: Callable[..., object], request: Reply, spec: Reply) -> object:
    """What the user's function returns for a request."""
    return function(
        request["prompt"],
        request["completion"],
        request["answer"],
        request["metadata"],
        **spec["options"],
        **request["extra"],
    )


@cache
def runner() -> asyncio.Runner:
    """The loop of all calls, for functions that need one: its import doubles a start."""
    import asyncio

    return asyncio.Runner()


def answer(function: Callable[..., object], request: Reply, spec: Reply) -> Reply:
    """Call the user's function; whatever it raises becomes the reply."""
    try:
        returned = call(function, request, spec)
        if inspect.iscoroutine(returned):
            returned = runner().run(returned)
    except Exception as err:  # noqa: BLE001  (the border to user code: answered, never dropped)
        return raised(err, spec)
    return reply_of(returned, place_of(function, spec["file"]))


async def answer_async(function: Callable[..., Any], request: Reply, spec: Reply) -> Reply:
    """The same for an `async def`."""
    try:
        returned = await call(function, request, spec)  # type: ignore[misc]
    except Exception as err:  # noqa: BLE001  (the border to user code: answered, never dropped)
        return raised(err, spec)
    return reply_of(returned, place_of(function, spec["file"]))


def raised(err: BaseException, spec: Reply) -> Reply:
    """The reply for what user code raised."""
    name = f"{spec['function']} raised {type(err).__name__}"
    is_final = bool(getattr(err, "final", False))
    return {"error": f"{where(err, spec['file'])}: {name}: {err}", "again": not is_final}


def limit_memory(memory_mb: int, *, by_kernel: bool = sys.platform == "linux") -> None:
    """Let this process have no more than `memory_mb` of memory; 0: no limit.

    On Linux an allocation beyond it fails (RLIMIT_DATA counts what is private and writable, so a
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


def check_signature(function: Callable[..., object], options: Reply, file: str) -> None:
    """Whether it takes what a verifier is called with.

    Raises:
        UnusableError: it does not; says how to write it.
    """
    try:
        signature = inspect.signature(function)
    except ValueError:  # of a compiled function: the first call will tell
        return
    try:
        extra = dict.fromkeys(extra_wanted(function, options))
        signature.bind("", "", "", {}, **options, **extra)
    except TypeError as err:
        name = getattr(function, "__name__", "it")
        given = f" and the options {', '.join(options)} by keyword" if options else ""
        wanted = f"{WANTED[:-1]}, *, {', '.join(options)})" if options else WANTED
        raise UnusableError(
            f"{place_of(function, file)}: {name}{signature} cannot be called with {WANTED}{given}: "
            f"{err}; write `def {name}{wanted}:`"
        ) from None


def _told(error: Exception) -> str:
    """An error of loading, and what to do where that is known."""
    if isinstance(error, SyntaxError):
        return f"{type(error).__name__}: {error.msg}"  # its own text repeats file and line
    missing = f"; install it into {sys.prefix}" if isinstance(error, ModuleNotFoundError) else ""
    return f"{type(error).__name__}: {error}{missing}"


def _sum(parts: dict[Any, object]) -> object:
    values = [value for value in parts.values() if isinstance(value, numbers.Real)]
    return math.fsum(values) if len(values) == len(parts) else 0.0  # the wrong part is named anyway


def _brief(value: object) -> str:
    text = repr(value)
    return f"{text[:80]}{'...' if len(text) > 80 else ''} of type {type(value).__name__}"


def _busy_at(file: str) -> str:
    """`file:line` of what the main thread is doing, in the user's file if it is there."""
    frame: FrameType | None = sys._current_frames().get(threading.main_thread().ident or 0)
    innermost = frame
    while frame is not None and frame.f_code.co_filename != file:
        frame = frame.f_back
    found = frame or innermost
    return f"{found.f_code.co_filename}:{found.f_lineno}" if found else ""


class Link:
    """The socket to the worker. When it closes the worker is gone: end, even amid user code."""

    def __init__(self, fd: int, file: str) -> None:
        self._socket = socket.socket(fileno=fd)
        self._file = file
        self._lock = threading.Lock()
        self.requests: queue.Queue[Reply] = queue.Queue()
        self.tasks: dict[int, asyncio.Task[Reply]] = {}  # asynchronous calls under way
        self.break_off: Callable[[int], None] = lambda number: None  # of a plain call, by `cancel`
        threading.Thread(target=self._read, name="worker-watch", daemon=True).start()

    def send(self, number: int, reply: Reply) -> None:
        """Answer a request."""
        with self._lock:
            self._socket.sendall(json.dumps({"id": number, **reply}).encode() + b"\n")

    def _read(self) -> None:
        try:
            for line in self._socket.makefile("rb"):
                request = json.loads(line)
                if "where" in request:
                    place = self._place_of_task(request["where"]) or _busy_at(self._file)
                    self.send(request["id"], {"where": place})
                    continue
                self.requests.put(request)
                if "cancel" in request:
                    self.break_off(request["cancel"])
        finally:  # also out of memory: nobody could reach this process any more
            try:
                if mark := os.environ.get(descendants.VARIABLE):
                    descendants.end_descendants(mark)
            finally:
                os._exit(0)

    def _place_of_task(self, number: int) -> str:
        """`file:line` where an asynchronous call waits; empty if there is none, or it is busy."""
        task = self.tasks.get(number)
        coroutine: Any = task.get_coro() if task is not None else None
        found = ""
        while (frame := getattr(coroutine, "cr_frame", None)) is not None:
            if frame.f_code.co_filename == self._file:
                found = f"{self._file}:{frame.f_lineno}"
            coroutine = coroutine.cr_await
        return found


async def serve(link: Link, answer: Callable[[Reply], Coroutine[Any, Any, Reply]], at: str) -> None:
    """Answer requests side by side, for ever; the link ends the process.

    Args:
        at: `file:line` of the user's code.
    """
    import asyncio

    loop = asyncio.get_running_loop()

    def begin(request: Reply) -> None:
        number = request["id"]
        if "cancel" in request:
            task = link.tasks.get(request["cancel"])
            if task is None:
                link.send(number, {})
                return
            task.add_done_callback(lambda _: link.send(number, {}))
            task.cancel()
            return
        task = link.tasks[number] = loop.create_task(answer(request))
        task.add_done_callback(lambda task: end(number, task))

    def end(number: int, task: asyncio.Task[Reply]) -> None:
        del link.tasks[number]
        if task.cancelled():
            reply: Reply = {"error": f"{at} was cancelled"}
        elif task.exception() is not None:
            return  # of SystemExit and the like: the process ends of it
        else:
            reply = task.result()
        link.send(number, reply)

    def pump() -> None:
        while True:
            loop.call_soon_threadsafe(begin, link.requests.get())

    threading.Thread(target=pump, name="requests", daemon=True).start()
    await loop.create_future()


def loaded(
    link: Link, spec: Reply, check: Callable[[Callable[..., object], Reply, str], None]
) -> tuple[Callable[..., Any], Reply] | None:
    """The user's code and `spec` with its file; None: it is unusable, and the worker was told."""
    try:
        limit_memory(spec["memory_mb"])
        function, file = named_code.load(spec)
        check(function, spec["options"], file)
    except UnusableError as err:
        link.send(0, {"error": str(err)})
        return None
    except Exception as err:  # noqa: BLE001  (the border to user code: answered, never dropped)
        link.send(0, {"error": f"{where(err, spec.get('file', ''))}: {_told(err)}"})
        return None
    return function, {**spec, "file": file}


def main(fd: int, spec: Reply) -> None:
    """Load, say so, then answer until the worker closes the link."""
    link = Link(fd, spec.get("file", ""))
    found = loaded(link, spec, check_signature)
    if found is None:
        return
    function, spec = found
    file = spec["file"]
    is_async = is_asynchronous(function)
    link.send(
        0,
        {
            "ready": place_of(function, file),
            "is_async": is_async,
            "wants": extra_wanted(function, spec["options"]),
        },
    )
    if is_async:
        runner().run(
            serve(
                link,
                lambda request: answer_async(function, request, spec),
                place_of(function, file),
            )
        )
    while True:
        request = link.requests.get()
        link.send(request["id"], answer(function, request, spec))


if __name__ == "__main__":
    main(int(sys.argv[1]), json.load(sys.stdin))
