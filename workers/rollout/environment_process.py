"""The child process that holds environments: JSON lines in, JSON lines out, paired by `id`.

Started by path with `python -P`, as `verifier_process.py` is, whose link, loading and limits it
uses. The user's class is made once per sample and kept by the sample's name until it is closed:

`{"id": .., "step": NAME, "start": {"prompt", "answer", "metadata"} or null, "completion": text,
"extra": {..}}` makes the object if `start` is there, calls its `step`, and is answered with
`{"says": text or [{"role", "content"}]}`, `{"ends": null or {"reward", "parts"}}` or `{"error"}`.
`{"id": .., "close": [NAME]}` ends what step they are in, if it is asynchronous, lets go of objects,
by their `close` if they have one, and is answered with `{}` or `{"error"}`. No name comes twice.
`where` is that of `verifier_process.py`. `cancel` is too, and breaks off a plain step as well: an
exception is raised amid it. It is answered when the step is over; one deep in a library may not be.
"""

from __future__ import annotations

import importlib.util
import inspect
import json
import signal
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    import asyncio

    from rlstreams.workers.rollout import verifier_process as base
else:
    _spec = importlib.util.spec_from_file_location(
        "_rlstreams_verifier_process", Path(__file__).with_name("verifier_process.py")
    )
    base = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(base)

Reply = dict[str, Any]

STEP_EXTRA = (
    "turn",
    "is_last",
    "num_tokens",
    "token_ids",
    "raw",
)  # for a step with such parameters


def check_class(made: Any, options: Reply, file: str) -> None:  # noqa: ANN401
    """Whether it is a class that can be made and stepped as described above.

    Raises:
        UnusableError: it is not; says how to write it.
    """
    name = getattr(made, "__name__", "it")
    if not isinstance(made, type) or not callable(getattr(made, "step", None)):
        raise base.UnusableError(
            f"{file}: {name} must be a class with a method `step(self, completion)`"
        )
    given = "".join(f", {option}" for option in options)
    try:
        inspect.signature(made).bind("", "", {}, **options)
    except TypeError as err:
        wanted = f"(self, prompt, answer, metadata{given})"
        raise base.UnusableError(
            f"{file}: {name} cannot be made with (prompt, answer, metadata{given}): {err}; write "
            f"`def __init__{wanted}:`"
        ) from None
    step: Any = made.step  # type: ignore[attr-defined]
    try:
        extra = dict.fromkeys(step_extra(made))
        inspect.signature(step).bind(None, "", **extra)
    except TypeError as err:
        raise base.UnusableError(
            f"{base.place_of(step, file)}: {name}.step cannot be called with (completion): "
            f"{err}; write `def step(self, completion):`"
        ) from None


def step_extra(made: Any) -> list[str]:  # noqa: ANN401
    """Which of `STEP_EXTRA` the class's step has parameters for."""
    return [name for name in STEP_EXTRA if name in inspect.signature(made.step).parameters]


def reply_of(returned: object, place: str) -> Reply:
    """What a step returned: text or messages to go on, a reward or None to end."""
    if returned is None:
        return {"ends": None}
    if isinstance(returned, str):
        return {"says": returned}
    if isinstance(returned, dict) and "role" in returned:
        returned = [returned]
    if isinstance(returned, list):
        if returned and all(_is_message(message) for message in returned):
            return {"says": returned} if _is_json(returned) else _no_json(place)
        return {
            "error": f"{place} returned a list that is not of messages "
            '{"role": text, "content": text}'
        }
    reply = base.reply_of(returned, place)
    if "error" in reply:
        return {"error": f"{reply['error']}, to end; text or messages to go on; None to be judged"}
    return {"ends": reply}


def _is_message(message: object) -> bool:
    return isinstance(message, dict) and all(
        isinstance(message.get(name), str) for name in ("role", "content")
    )


def _is_json(messages: object) -> bool:
    try:
        json.dumps(messages)
    except (TypeError, ValueError, RecursionError):
        return False
    return True


def _no_json(place: str) -> Reply:
    return {
        "error": f"{place} returned a message with a field that is not JSON: texts, numbers, "
        "true, false, null, lists and objects of them"
    }


class Held:
    """The objects of the samples that are under way."""

    def __init__(self, made: Any, spec: Reply) -> None:  # noqa: ANN401
        self._made = made
        self._spec = spec
        self._held: dict[str, Any] = {}
        self._steps: dict[str, asyncio.Task[Any]] = {}  # asynchronous ones under way
        self._overtaken: set[str] = set()  # closed before their first step came
        self._place = base.place_of(made.step, spec["file"])

    async def answer(self, request: Reply) -> Reply:
        """The reply to a request; whatever the user's code raises becomes one."""
        try:
            if "close" in request:
                return await self._close(request["close"])
            return reply_of(await self._stepped(request), self._place)
        except Exception as err:  # noqa: BLE001  (the border to user code: answered, never dropped)
            return base.raised(err, self._spec)

    def answer_plain(self, request: Reply) -> Reply:
        """The same, without a loop where nothing is to be awaited."""
        coroutine = self.answer(request)
        try:
            coroutine.send(None)
        except StopIteration as stop:
            reply: Reply = stop.value
            return reply
        coroutine.close()
        return {
            "error": f"{self._place}: `step` or `close` awaits something, but `step` is no "
            "`async def`"
        }

    async def _stepped(self, request: Reply) -> object:
        name, step = request["step"], self._step(request)
        if not inspect.isawaitable(step):
            return step
        if base.is_asynchronous(self._made.step):
            import asyncio  # late: a plain class needs none

            task = asyncio.current_task()
            assert task is not None
            self._steps[name] = task
        try:
            return await step
        finally:
            self._steps.pop(name, None)

    def _step(self, request: Reply) -> object:
        name, start = request["step"], request["start"]
        if name in self._overtaken:
            self._overtaken.discard(name)
            raise base.UnusableError("the sample was given up")  # nobody reads it
        if start is not None:
            self._held[name] = None  # also where it cannot be made
            self._held[name] = self._made(
                start["prompt"], start["answer"], start["metadata"], **self._spec["options"]
            )
        return self._held[name].step(request["completion"], **request["extra"])

    async def _close(self, names: list[str]) -> Reply:
        errors = []
        for name in names:
            if (step := self._steps.get(name)) is not None:
                import asyncio  # late: a plain class needs none

                step.cancel()
                await asyncio.wait([step])
            if name not in self._held:
                self._overtaken.add(name)
            held = self._held.pop(name, None)
            close = getattr(held, "close", None)
            try:
                await _awaited(close() if callable(close) else None)
            except Exception as err:  # noqa: BLE001  (told when all are closed)
                errors.append(base.raised(err, self._spec)["error"])
        return {"error": "; ".join(errors)} if errors else {}


async def _awaited(value: Any) -> object:  # noqa: ANN401
    return await value if inspect.isawaitable(value) else value


class BrokenOff(BaseException):
    """Raised amid a plain step that has missed its deadline."""


class Plain:
    """Calls one after the other in the main thread, where a signal can break one off.

    Objects stay in the thread that made them, which some libraries want; what is waited for there
    (a sleep, a socket, a lock, a process) and any loop of Python is left by the exception.
    """

    SIGNAL = signal.SIGUSR2  # alarms are left to user code

    def __init__(self, link: base.Link, held: Held) -> None:
        self._link = link
        self._held = held
        self._under_way: int | None = None
        self._to_break: int | None = None
        signal.signal(self.SIGNAL, self._raise)
        link.break_off = self._break_off

    def serve(self) -> NoReturn:
        """Answer for ever; the link ends the process."""
        while True:
            request = self._link.requests.get()
            # A cancel stands behind what it breaks off: that is over when its turn has come.
            self._link.send(request["id"], {} if "cancel" in request else self._answer(request))

    def _answer(self, request: Reply) -> Reply:
        try:
            self._under_way = request["id"]
            reply = self._held.answer_plain(request)
            self._under_way = None  # in the `try`: nothing is raised from here on
        except BrokenOff:
            return {"error": "was broken off"}  # nobody reads it
        return reply

    def _break_off(self, number: int) -> None:
        """On the link's thread."""
        self._to_break = number
        signal.pthread_kill(threading.main_thread().ident or 0, self.SIGNAL)

    def _raise(self, *_: object) -> None:
        if self._under_way is not None and self._under_way == self._to_break:
            self._under_way = None
            raise BrokenOff


def main(fd: int, spec: Reply) -> None:
    """Load, say so, then answer until the worker closes the link."""
    link = base.Link(fd, spec.get("file", ""))
    found = base.loaded(link, {**spec, "kind": "class"}, check_class)
    if found is None:
        return
    made: Any
    made, spec = found
    held = Held(made, spec)
    place = base.place_of(made.step, spec["file"])
    is_async = inspect.iscoroutinefunction(made.step)
    ready = {"ready": place, "is_async": is_async, "cancels": True, "wants": step_extra(made)}
    if is_async:
        link.send(0, ready)
        base.runner().run(base.serve(link, held.answer, place))
    plain = Plain(link, held)
    link.send(0, ready)
    plain.serve()


if __name__ == "__main__":
    main(int(sys.argv[1]), json.load(sys.stdin))
