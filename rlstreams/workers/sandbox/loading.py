"""Loading of user code in its process: from `file.py:name` or `module:name` to a checked object.

Loaded by path there, so it imports nothing of ours.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

# Arguments of a function; of a class; of its method `step`.
FUNCTION = ("prompt", "completion", "answer", "metadata")
MADE_WITH = ("prompt", "answer", "metadata")
STEP = ("completion",)


class UnusableError(Exception):
    """The code has been run, and cannot be called as wanted; says why."""


def load(spec: Mapping[str, Any]) -> tuple[Callable[..., object], str]:
    """The object that `spec` names, and the file it was looked for in.

    Modules beside a file can be imported by it; a module is looked for in the working folder last.

    Args:
        spec: `name` of the object; `file` or `module`; `kind`, "function" or "class", for messages.

    Raises:
        UnusableError: there is no such thing; says where it was looked for, and what is nearest.
        Exception: whatever the user's code raises.
    """
    if file := spec["file"]:
        sys.path.insert(0, str(Path(file).parent))
        module_spec = importlib.util.spec_from_file_location(Path(file).stem, file)
        if module_spec is None or module_spec.loader is None:
            raise UnusableError(f"{file} is not a Python file")
        module = importlib.util.module_from_spec(module_spec)
        sys.modules[module_spec.name] = module
        module_spec.loader.exec_module(module)
    else:
        sys.path.append(str(Path.cwd()))
        module = _imported(spec["module"])
        file = getattr(module, "__file__", None) or spec["module"]
    return picked(module, spec, file), file


def picked(module: ModuleType, spec: Mapping[str, Any], file: str) -> Callable[..., object]:
    """The object of a module that `spec` names, of the file for messages; raises as `load`."""
    name, kind = spec["name"], spec["kind"]
    found: object = getattr(module, name, None)
    if not callable(found):
        raise UnusableError(f"{file} has no {kind} {name!r} ({_instead(module, name, kind)})")
    if kind == "function" and isinstance(found, type):
        made = f"name a function, or an object made of it, as by `made = {name}()`"
        raise UnusableError(f"{file}: {name} is a class: {spec.get('for_class', made)}")
    return found


def checked_function(made: Any, spec: Mapping[str, Any], file: str) -> list[str]:  # noqa: ANN401
    """Check the function; return the names of `spec["extra"]` that it takes.

    Raises:
        UnusableError: it cannot be called as a verifier is; says how to write it.
    """
    extra = _extra_wanted(made, len(FUNCTION), spec)
    keywords = {**spec["options"], **dict.fromkeys(extra)}
    check_call(made, FUNCTION, keywords, place_of(made, file), getattr(made, "__name__", "it"))
    return extra


def checked_class(made: Any, spec: Mapping[str, Any], file: str) -> list[str]:  # noqa: ANN401
    """Check the class; return the names of `spec["extra"]` that its `step` takes.

    Raises:
        UnusableError: it cannot be made or stepped as an environment is; says how to write it.
    """
    name = spec["name"]
    step: Any = getattr(made, "step", None)
    if not isinstance(made, type) or not callable(step):
        raise UnusableError(
            f"{file}: {name} must be a class with a method `step(self, completion)`"
        )
    check_call(made, MADE_WITH, spec["options"], file, name, "__init__")
    extra = _extra_wanted(step, 1 + len(STEP), {**spec, "options": {}})
    check_call(step, STEP, dict.fromkeys(extra), place_of(step, file), f"{name}.step", "step")
    return extra


def is_asynchronous(function: Callable[..., object]) -> bool:
    """Whether a call gives a coroutine; of an object the method decides."""
    found = inspect.unwrap(function)
    return inspect.iscoroutinefunction(found) or inspect.iscoroutinefunction(
        getattr(found, "__call__", None)  # noqa: B004  (the method is wanted, not whether)
    )


def place_of(function: Callable[..., object], file: str) -> str:
    """`file:line` of the function's definition, as far as that is known."""
    found = inspect.unwrap(function)
    called = getattr(type(found), "__call__", None)  # noqa: B004  (the method is wanted)
    code = getattr(found, "__code__", None) or getattr(called, "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code else file


def where(error: BaseException, file: str) -> str:
    """`file:line` of the innermost frame in the user's file, or of the innermost at all."""
    if isinstance(error, SyntaxError) and error.filename is not None:
        return f"{error.filename}:{error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if frame.filename == file]
    innermost = (own or list(frames))[-1]
    return f"{innermost.filename}:{innermost.lineno}"


def load_error(error: Exception, file: str) -> str:
    """An error of loading with its place, and what to do where that is known."""
    # The text of a syntax error repeats file and line.
    text = str(error.msg if isinstance(error, SyntaxError) else error)
    missing = f"; install it into {sys.prefix}" if isinstance(error, ModuleNotFoundError) else ""
    return f"{where(error, file)}: {type(error).__name__}: {text}{missing}"


def _extra_wanted(function: Any, num_taken: int, spec: Mapping[str, Any]) -> list[str]:  # noqa: ANN401
    """Parameters beyond the first `num_taken` that can be filled in and are no options."""
    try:
        parameters = list(inspect.signature(function).parameters.values())[num_taken:]
    except ValueError:  # of a compiled function
        return []
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    names = [p.name for p in parameters if p.kind in by_name]
    return [name for name in spec["extra"] if name in names and name not in spec["options"]]


def check_call(
    function: Any,  # noqa: ANN401
    arguments: Sequence[str],
    keywords: Mapping[str, object],
    place: str,
    name: str,
    method: str = "",
) -> None:
    """Check that a function takes these arguments, and these by keyword.

    Raises:
        UnusableError: it does not; says how to write it.
    """
    try:
        signature = inspect.signature(function)
    except ValueError:  # of a compiled function: the first call will show it
        return
    own = ("self",) if method == "step" else ()
    try:
        signature.bind(*own, *arguments, **keywords)
    except TypeError as err:
        by_name = ["*", *keywords] if keywords else []
        given = ", ".join([*arguments, *by_name])
        wanted = ", ".join([*(["self"] if method else []), *arguments, *by_name])
        advice = _other_options(signature, keywords) or f"write `def {method or name}({wanted}):`"
        raise UnusableError(
            f"{place}: {name}{signature} cannot be called with ({given}): {err}; {advice}"
        ) from None


def _other_options(signature: inspect.Signature, options: Mapping[str, object]) -> str:
    """Advice on options of other names than the function's keyword arguments; "": it has none."""
    takes = [p.name for p in signature.parameters.values() if p.kind is p.KEYWORD_ONLY]
    unknown = [name for name in options if name not in signature.parameters]
    if not takes or not unknown:
        return ""
    near = difflib.get_close_matches(unknown[0], takes, n=1, cutoff=0.5)
    meant = f"; did you mean {near[0]!r}?" if near else ""
    return f"its options are {', '.join(takes)}{meant}"


def _imported(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as err:
        if not f"{name}.".startswith(f"{err.name}."):
            raise  # one that the user's module imports
        raise UnusableError(
            f"there is no module {err.name!r} in {Path.cwd()}, nor among the packages of "
            f"{sys.prefix}: install it there, or name a file: `path/to/file.py:NAME`"
        ) from None


def _instead(module: ModuleType, name: str, kind: str) -> str:
    """The module's own objects of that kind, and the one of the nearest name."""
    if hasattr(module, name):
        return f"that is {getattr(module, name)!r:.60}, which cannot be called"
    own = [
        key
        for key, value in vars(module).items()
        if getattr(value, "__module__", "") == module.__name__
        and inspect.isclass(value) == (kind == "class")
    ]
    near = difflib.get_close_matches(name, own, n=1)
    meant = f"; did you mean {near[0]!r}?" if near else ""
    return f"it has: {', '.join(own)}{meant}" if own else f"it has no {kind} at all"
