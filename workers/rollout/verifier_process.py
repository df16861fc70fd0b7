"""The child process that runs a user's reward function: one JSON line in, one JSON line out.

Started by path with `python -P`, so it imports nothing of ours and nothing of ours is importable
under a short name. Arguments: the file descriptor of a connected socket, the user's file, the
name of the function. First it says `{"ready": true}` or `{"error": ...}`; then it answers each
request, an object of `prompt`, `completion`, `answer` and `metadata`, with
`{"reward": number, "parts": {name: number}}` or `{"error": text}`.
"""

from __future__ import annotations

import importlib.util
import json
import math
import numbers
import os
import queue
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

Reply = dict[str, Any]


class NoFunctionError(Exception):
    """The file has been run, and has not what was named."""


def load(file: Path, name: str) -> Callable[..., object]:
    """The function `name` of `file`; modules beside the file can be imported by it.

    Raises:
        NoFunctionError: the file has no such function.
        Exception: whatever the file raises.
    """
    sys.path.insert(0, str(file.parent))
    spec = importlib.util.spec_from_file_location(file.stem, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    function = getattr(module, name, None)
    if not callable(function):
        known = [n for n, v in vars(module).items() if getattr(v, "__module__", "") == spec.name]
        raise NoFunctionError(f"{file} has no function {name!r} (it has: {', '.join(known)})")
    return function  # type: ignore[no-any-return]


def where(error: BaseException, file: Path) -> str:
    """`file:line` of the innermost frame in the user's file, or of the innermost at all."""
    frames = traceback.extract_tb(error.__traceback__)
    if isinstance(error, SyntaxError) and error.filename is not None:
        return f"{error.filename}:{error.lineno}"
    own = [frame for frame in frames if frame.filename == str(file)]
    innermost = (own or list(frames))[-1]
    return f"{innermost.filename}:{innermost.lineno}"


def reply_of(returned: object, function: str) -> Reply:
    """What the function returned: a number, or a number and named parts of it."""
    reward = returned
    parts: dict[str, object] = {}
    if isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[1], dict):
        reward, parts = returned
    values: dict[str, float] = {}
    for name, value in (*parts.items(), ("", reward)):
        if not isinstance(value, numbers.Real) or not math.isfinite(value):
            what = f"part {name!r} is" if name else "returned"
            return {
                "error": f"{function} {what} {_brief(value)}; wanted a finite number, "
                "or (number, {part: number})"
            }
        values[str(name)] = float(value)
    return {"reward": values.pop(""), "parts": values}


def _brief(value: object) -> str:
    text = repr(value)
    return f"{text[:80]}{'...' if len(text) > 80 else ''} of type {type(value).__name__}"


def answer(function: Callable[..., object], request: Reply, file: Path, name: str) -> Reply:
    """Call the user's function; whatever it raises becomes the reply."""
    try:
        returned = function(
            request["prompt"], request["completion"], request["answer"], request["metadata"]
        )
    except Exception as err:  # noqa: BLE001  (the border to user code: answered, never dropped)
        return {"error": f"{where(err, file)}: {name} raised {type(err).__name__}: {err}"}
    return reply_of(returned, f"{file}:{name}")


def _requests(link: socket.socket) -> queue.Queue[bytes]:
    """Lines from `link`. When it closes the worker is gone: end, even amid user code."""
    lines: queue.Queue[bytes] = queue.Queue()

    def read() -> None:
        for line in link.makefile("rb"):
            lines.put(line)
        os._exit(0)

    threading.Thread(target=read, name="worker-watch", daemon=True).start()
    return lines


def main(fd: int, file: Path, name: str) -> None:
    """Load, say so, then answer until the worker closes the link."""
    link = socket.socket(fileno=fd)
    lines = _requests(link)

    def send(reply: Reply) -> None:
        link.sendall(json.dumps(reply).encode() + b"\n")

    try:
        function = load(file, name)
    except NoFunctionError as err:
        send({"error": str(err)})
        return
    except Exception as err:  # noqa: BLE001  (the border to user code: answered, never dropped)
        send({"error": f"{where(err, file)}: {type(err).__name__}: {err}"})
        return
    send({"ready": True})
    while True:
        send(answer(function, json.loads(lines.get()), file, name))


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
