"""What a script or a notebook gives a run: a reward function, rows; as files that a run can name.

Roles and sandboxes are other processes, which read files. A name of a file holds the hash of what
is in it, so that no start changes a file that another one uses.
"""

from __future__ import annotations

import ast
import builtins
import dis
import hashlib
import inspect
import json
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

from rlstreams.streams.log.errors import ConfigError
from rlstreams.workers.dataset.files import write_whole

_MAIN = "__main__"  # a script that runs, a notebook
_HEAD = "from __future__ import annotations\n"
_SECRET = re.compile(r"(?i)(key|token|secret|password)$")
_INNER = "is defined inside of another function, whose values it may use"


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenFile:
    """A file that is written when the run starts."""

    path: Path
    text: str

    @classmethod
    def of(cls, folder: Path, stem: str, suffix: str, text: str) -> GivenFile:
        """In the folder `given` of the run's."""
        digest = hashlib.sha256(text.encode()).hexdigest()[:12]
        return cls(path=folder.absolute() / "given" / f"{stem}_{digest}{suffix}", text=text)

    def write(self) -> None:
        """Whole or not at all; no other user can look into the folder, as `up` has it."""
        for folder in (self.path.parent.parent, self.path.parent):
            folder.mkdir(0o700, parents=True, exist_ok=True)
        write_whole(self.path, self.text.encode())


def rows_file(rows: Iterable[Mapping[str, Any]], folder: Path) -> GivenFile:
    """Rows as JSON lines.

    Raises:
        ConfigError: a row is no mapping, or holds what JSON cannot; names it.
    """
    lines = []
    for number, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise ConfigError(f"dataset: row {number} must be a dict, got {type(row).__name__}")
        try:
            lines.append(json.dumps(dict(row), allow_nan=False) + "\n")
        except (TypeError, ValueError) as err:
            raise ConfigError(f"dataset: row {number} cannot be written as JSON: {err}") from err
    return GivenFile.of(folder, "rows", ".jsonl", "".join(lines))


def reward_place(function: Callable[..., object], folder: Path) -> tuple[str, GivenFile | None]:
    """`file.py:name` or `module:name` of a function, and the file if it has to be written.

    A function of a module is named where it is. One of a script that runs, or of a notebook, is
    copied with what it uses: the module could not be imported without running all of it.

    Raises:
        ConfigError: a lambda, a closure, an object, or one that uses what cannot be copied.
    """
    name = str(getattr(function, "__qualname__", type(function).__qualname__))
    if not isinstance(function, FunctionType):
        raise _refused(name, f"it is an object of {type(function).__name__}, not a function")
    if function.__name__ == "<lambda>":
        raise _refused(name, "a lambda has no name in a file")
    if function.__closure__ or "<locals>" in name:
        raise _refused(name, f"it {_INNER}")
    module = sys.modules.get(function.__module__)
    if function.__module__ != _MAIN and getattr(module, name, None) is function:
        if getattr(module, "__package__", ""):
            return f"{function.__module__}:{name}", None
        return f"{inspect.getfile(function)}:{name}", None
    text = "".join(_Copy(function).parts)
    file = GivenFile.of(folder, "reward", ".py", text)
    return f"{file.path}:{name}", file


def _refused(name: str, why: str) -> ConfigError:
    return ConfigError(
        f"reward: {name} cannot be given to a run: {why}; define it by `def` at the top of a file "
        "or a cell, or name it as file.py:function"
    )


class _Copy:
    """Source of a function and of the globals that it uses, in an order in which it can be run."""

    def __init__(self, function: FunctionType) -> None:
        self._name = function.__qualname__
        self._scope = function.__globals__
        self._done: set[str] = set()
        self.parts = [_HEAD]
        self._add(function.__name__, function)

    def _add(self, name: str, value: object) -> None:
        """One global; those that it uses come first."""
        if name in self._done:
            return
        self._done.add(name)
        home, own = getattr(value, "__module__", ""), getattr(value, "__qualname__", "")
        if isinstance(value, str) and _SECRET.search(name):
            why = f"it uses {name}, by its name a secret, which a copy would show"
            raise _refused(self._name, f"{why}: read it from os.environ inside of the function")
        if _is_literal(value):
            self.parts.append(f"{name} = {value!r}\n")
        elif isinstance(value, ModuleType):
            self.parts.append(f"import {value.__name__} as {name}\n")
        elif isinstance(value, re.Pattern):
            compiled = f"__import__('re').compile({value.pattern!r}, {value.flags})"
            self.parts.append(f"{name} = {compiled}\n")
        elif isinstance(value, FunctionType) and home == _MAIN:
            self._add_source(name, value)
        elif own and home != _MAIN and getattr(sys.modules.get(home), own, None) is value:
            self.parts.append(f"from {home} import {own} as {name}\n")
        else:
            raise _refused(
                self._name,
                f"it uses {name}, an object of {type(value).__name__}, which is not text, number, "
                "list, dict, pattern, module, function, or of an importable module",
            )

    def _add_source(self, name: str, value: FunctionType) -> None:
        if value.__closure__ or "<locals>" in value.__qualname__:
            raise _refused(self._name, f"it uses {name}, which {_INNER}")
        try:
            text = textwrap.dedent(inspect.getsource(value))
        except OSError as err:
            raise _refused(self._name, f"the source of {name} is not known here") from err
        code = compile(f"{_HEAD}{text}", name, "exec", dont_inherit=True)
        if name not in _bound(code):
            own = f"it uses {name}, which is {value.__name__}: call it by its own name"
            raise _refused(self._name, own)
        for used in _globals_of(code):
            if used in self._scope:
                self._add(used, self._scope[used])
            elif not hasattr(builtins, used):
                raise _refused(self._name, f"it uses {used}, which is not defined")
        self.parts.append(f"\n\n{text}")


def _globals_of(code: CodeType) -> Iterator[str]:
    """Names that a definition reads and does not bind: when it is made, and when it is called."""
    found = [(i.opname, i.argval) for i in dis.get_instructions(code)]
    reads = {name for kind, name in found if kind in ("LOAD_GLOBAL", "LOAD_NAME")}
    yield from sorted(name for name in reads - _bound(code) if not name.startswith("__"))
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _globals_of(inner)


def _bound(code: CodeType) -> set[str]:
    return {i.argval for i in dis.get_instructions(code) if i.opname == "STORE_NAME"}


def _is_literal(value: object) -> bool:
    """Whether its `repr` gives it back."""
    try:
        return _is_same(ast.literal_eval(repr(value)), value)
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return False


def _is_same(found: Any, value: Any) -> bool:  # noqa: ANN401
    """Also in type, with what is in it: a subclass of dict is no dict."""
    if type(found) is not type(value) or found != value:
        return False
    if isinstance(found, dict):
        return all(map(_is_same, [*found, *found.values()], [*value, *value.values()]))
    return not isinstance(found, list | tuple) or all(map(_is_same, found, value))
