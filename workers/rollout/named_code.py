"""From `file.py:name` or `module:name` to the object, in the child process that runs user code.

Loaded by path there, so it imports nothing of ours.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any


class UnusableError(Exception):
    """The code has been run, and cannot be called as wanted; says why."""


def load(spec: Mapping[str, Any]) -> tuple[Callable[..., object], str]:
    """What `spec` names, and the file it was looked for in.

    Modules beside a file can be imported by it; a module is looked for in the working folder last.

    Args:
        spec: `function`, its name; `file` or `module`; `kind`, "function" or "class", for messages.

    Raises:
        UnusableError: there is no such thing; says where it was looked for, and what is nearest.
        Exception: whatever the user's code raises.
    """
    name = spec["function"]
    if file := spec.get("file", ""):
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
    found = getattr(module, name, None)
    if not callable(found):
        kind = spec.get("kind", "function")
        raise UnusableError(f"{file} has no {kind} {name!r} ({_instead(module, name, kind)})")
    return found, file


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
    """What the module itself defines of that kind, and the one of the nearest name."""
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
