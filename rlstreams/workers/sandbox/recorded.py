"""A user's function made of source text, in this process: its modules are apart from all others.

The text comes from the files as they are, or from a claim in the log: so a step is done again with
the code that it was done with, though the files were edited since. Imports of the text find each
other while it is loaded or called, and nobody else finds them.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import importlib.abc
import importlib.machinery
import inspect
import json
import linecache
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import FrozenInstanceError
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from rlstreams.streams.log.errors import ConfigError
from rlstreams.workers.config.user_code import ADVANTAGE, LOSS, OPTIMIZER, Option, Own, located
from rlstreams.workers.sandbox import loading

Code = Mapping[str, str]  # source by `FIELD: PATH`, as `TrainerStarted.code`
_ARGUMENTS = {LOSS: ("tokens",), ADVANTAGE: ("samples",), OPTIMIZER: ("parameter",)}
_NO_CLASS = (
    "write a function of one parameter, `def update(parameter):`, that returns its new values and "
    "a dict of its state"
)
_IN_FORCE = threading.RLock()
SLOW_S = 2.0  # of a call that a report names
_UNDER_WAY: list[tuple[str, float]] = []  # calls in this process, under the lock: when each began


class OwnCodeError(ConfigError):
    """Code of the user's that the trainer runs cannot be loaded, raised, or gave what it must not;
    names the place. Another attempt would find the same."""


class OwnUpdateError(OwnCodeError):
    """An optimizer of the user's failed in the middle of an update: no sample by itself is at
    fault, and some parameters are updated while others are not."""


class _Modules(importlib.abc.MetaPathFinder, importlib.abc.InspectLoader):
    """Modules by the relative paths of their texts."""

    def __init__(self, texts: Mapping[str, str], root: Path | None) -> None:
        """
        Args:
            root: folder that the paths are relative to, for messages; None: none in particular.
        """
        self._texts, self._root = texts, root
        self._made: dict[str, ModuleType] = {}
        paths = [Path(path).with_suffix("") for path in texts]
        paths = [path.parent if path.name == "__init__" else path for path in paths]
        within = (p for path in paths for p in (path, *path.parents) if p.parts)
        self._names = {".".join(path.parts) for path in within}

    @contextmanager
    def in_force(self) -> Iterator[None]:
        """Have imports find these modules, in place of others of their names."""
        with _IN_FORCE:
            others = _taken(self._names)
            sys.modules.update(self._made)
            sys.meta_path.insert(0, self)
            try:
                yield
            finally:
                sys.meta_path.remove(self)
                self._made = _taken(self._names)
                sys.modules.update(others)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """See `importlib.abc.MetaPathFinder`."""
        del path, target
        if fullname not in self._names:
            return None
        file, is_package = self._file(fullname)
        spec = importlib.machinery.ModuleSpec(
            fullname,
            self if file else None,
            origin=self._place(file) if file else None,
            is_package=is_package,
        )
        spec.has_location = bool(file)
        return spec

    def get_source(self, fullname: str) -> str:
        """See `importlib.abc.InspectLoader`."""
        return self._texts[self._file(fullname)[0]].removeprefix("\ufeff")

    def exec_module(self, module: ModuleType) -> None:
        """Run a module's text; tracebacks and `inspect` show this text, not the file's."""
        text, place = self.get_source(module.__name__), str(module.__file__)
        linecache.cache[place] = len(text), None, text.splitlines(keepends=True), place
        exec(compile(text, place, "exec", dont_inherit=True), vars(module))

    def _file(self, name: str) -> tuple[str, bool]:
        """Path of a module's text, "" of a package without one; whether it is a package."""
        path = name.replace(".", "/")
        package = f"{path}/__init__.py"
        if package in self._texts:
            return package, True
        return (f"{path}.py", False) if f"{path}.py" in self._texts else ("", True)

    def _place(self, file: str) -> str:
        return str(self._root / file) if self._root else file


def _taken(names: set[str]) -> dict[str, ModuleType]:
    return {name: sys.modules.pop(name) for name in names if name in sys.modules}


class OwnFunction:
    """The function that a field names, ready to be called."""

    def __init__(
        self, field: str, name: str, texts: Mapping[str, str], options: Mapping[str, Option],
        arguments: Sequence[str],
    ) -> None:  # fmt: skip
        """
        Args:
            texts: source by relative path.
            arguments: names of what it is called with, before its options.

        Raises:
            OwnCodeError: it cannot be loaded, or not be called so.
        """
        file, module, function = located(name) or ("", "", name)
        entry = Path(file).stem if file else module
        self.field, self._options, self.file = field, options, file
        self.given = arguments[0]
        self._modules = _Modules(texts, Path(file).parent if file else None)
        spec = {"name": function, "kind": "function", "options": options, "extra": ()}
        spec |= {"for_class": _NO_CLASS} if field == OPTIMIZER else {}
        tops = {path.partition("/")[0].removesuffix(".py") for path in texts}
        if shadowed := sorted(tops & sys.stdlib_module_names):
            raise OwnCodeError(
                f"{field} is {name!r}, which imports {shadowed[0]}.py, and Python has a module of "
                "that name: rename the file"
            )
        with self._modules.in_force():
            try:
                made = importlib.import_module(entry)
                self.file = str(made.__file__)
                self._function = loading.picked(made, spec, self.file)
                self.place = loading.place_of(self._function, self.file)
                loading.check_call(self._function, arguments, options, self.place, function)
            except loading.UnusableError as err:
                raise OwnCodeError(f"{field}: {err}") from None
            except Exception as err:
                raise OwnCodeError(f"{field}: {loading.load_error(err, self.file)}") from err
        if loading.is_asynchronous(self._function):
            raise OwnCodeError(f"{field}: {self.place}: {function} must be a plain function")

    def __call__(
        self,
        given: Any,  # noqa: ANN401
        passes: Callable[[Exception], bool] = lambda _: False,
    ) -> Any:  # noqa: ANN401
        """The function's result.

        Args:
            passes: whether an exception is another's to handle, such as one of full memory.

        Raises:
            OwnCodeError: it raised; names the line.
        """
        with self._modules.in_force(), self._under_way():
            try:
                return self._function(given, **self._options)
            except Exception as err:
                if passes(err):
                    raise
                at, more = loading.where(err, self.file), _fields_there(err)
                raise OwnCodeError(
                    f"{self.field}: {at}: {type(err).__name__}: {err}{more}"
                ) from err

    @contextmanager
    def _under_way(self) -> Iterator[None]:
        _UNDER_WAY.append((f"{self.field} of {self.place}", time.monotonic()))
        try:
            yield
        finally:
            _UNDER_WAY.pop()

    def refused(self, why: str) -> OwnCodeError:
        """The error that its result is not what it must be."""
        return OwnCodeError(f"{self.field}: {self.place} {why}")


def slow_call() -> str:
    """The call of a user's function that has taken `SLOW_S` by now, for a report; "": none has."""
    for what, since_s in tuple(_UNDER_WAY):
        if time.monotonic() - since_s >= SLOW_S:
            return f"in {what}"
    return ""


def _fields_there(error: Exception) -> str:
    """The fields of what a function was given, if it asked for one that is not there; what to do
    where it set one."""
    if isinstance(error, FrozenInstanceError):
        return "; return what is new, or change the tensor by a method such as `sub_`"
    if not isinstance(error, AttributeError):
        return ""
    kind = type(error.obj)
    if not kind.__module__.startswith("rlstreams."):
        return ""
    public = [name for name in dir(kind) if not name.startswith("_") and not hasattr(tuple, name)]
    names = [name for name in public if not inspect.ismethod(getattr(kind, name))]
    near = difflib.get_close_matches(str(error.name), names, n=1)
    return f"; did you mean {near[0]!r}?" if near else f"; it has {', '.join(names)}"


class Owning(Protocol):
    """A section whose fields may name functions of the user's."""

    def own(self) -> Iterator[Own]:
        """Those that they name."""


def own_functions(by: Owning, code: Code) -> dict[str, OwnFunction]:
    """The user's functions by field, of the source that a claim has. Made once for the same source.

    Raises:
        OwnCodeError: as `OwnFunction`; or `code` has none of a field.
    """
    found: dict[str, OwnFunction] = {}
    for field, name, options in by.own():
        start = f"{field}: "
        texts = {key.removeprefix(start): t for key, t in code.items() if key.startswith(start)}
        if not texts:
            raise OwnCodeError(f"{field} is {name!r}, whose source is not in the claim")
        found[field] = _made(field, name, json.dumps([texts, options]))
    return found


@functools.lru_cache(maxsize=8)
def _made(field: str, name: str, said: str) -> OwnFunction:
    texts, options = json.loads(said)
    return OwnFunction(field, name, texts, options, _ARGUMENTS[field])
