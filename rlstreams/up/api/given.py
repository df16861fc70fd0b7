"""Files of the functions and the rows that a script or a notebook passes to a run.

Roles and sandboxes are other processes, which read files. A name of a file holds the hash of what
is in it, so that no start changes a file that another one uses.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from pickle import PicklingError
from typing import Any

import cloudpickle

from rlstreams.streams.log.errors import ConfigError
from rlstreams.streams.synced import write_whole

_MAIN = "__main__"  # a script that runs, a notebook
_SECRET = re.compile(r"(?i)(key|token|secret|password)$")
_PICKLED = """# {name}, as cloudpickle has written it with all that it uses. For people, its source:
{source}
import pickle

{stem} = pickle.loads({data!r})
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenFile:
    """A file that is written when the run starts."""

    path: Path
    text: str

    @classmethod
    def of(cls, folder: Path, stem: str, suffix: str, text: str) -> GivenFile:
        """Name a file of the folder `given`, in the run's, by the hash of its text."""
        digest = hashlib.sha256(text.encode()).hexdigest()[:12]
        return cls(path=folder.absolute() / "given" / f"{stem}_{digest}{suffix}", text=text)

    def write(self) -> None:
        """Write the file whole or not at all; as with `up`, no other user can read its folders."""
        for folder in (self.path.parent.parent, self.path.parent):
            folder.mkdir(0o700, parents=True, exist_ok=True)
        write_whole(self.path, self.text.encode())


def rows_file(rows: Iterable[Mapping[str, Any]], folder: Path) -> GivenFile:
    """Rows as JSON lines.

    Raises ConfigError: a row is no mapping, or holds what JSON cannot; names it.
    """
    lines = []
    for number, row in enumerate(_as_dicts(rows)):
        if not isinstance(row, Mapping):
            raise ConfigError(f"dataset: row {number} must be a dict, got {type(row).__name__}")
        try:
            lines.append(json.dumps(dict(row), allow_nan=False) + "\n")
        except (TypeError, ValueError) as err:
            raise ConfigError(f"dataset: row {number} cannot be written as JSON: {err}") from err
    return GivenFile.of(folder, "rows", ".jsonl", "".join(lines))


def _as_dicts(rows: Any) -> Iterable[Any]:  # noqa: ANN401
    """Rows of a pandas or polars DataFrame or a pyarrow Table, which iterate over columns."""
    for name, words in (("to_pylist", ()), ("to_dicts", ()), ("to_dict", ("records",))):
        if hasattr(rows, "columns") and hasattr(rows, name):
            found: Iterable[Any] = getattr(rows, name)(*words)
            return found
    return rows  # type: ignore[no-any-return]


def function_place(
    stem: str, function: Callable[..., object], folder: Path
) -> tuple[str, GivenFile | None]:
    """`file.py:name` or `module:name` of a function, and the file if it has to be written.

    A function of a module is named where it is. Any other, of a script that runs or of a notebook,
    is pickled with what it uses: the module could not be imported without running all of it.

    Args:
        stem: `reward`, `loss`, `advantage` or `optimizer`: name of the file and of the function in
            it.

    Raises:
        ConfigError: it uses what cannot be pickled, or a text that is named like a secret.
    """
    name = str(getattr(function, "__qualname__", type(function).__qualname__))
    module = sys.modules.get(function.__module__)
    if function.__module__ != _MAIN and getattr(module, name, None) is function:
        if getattr(module, "__package__", ""):
            return f"{function.__module__}:{name}", None
        return f"{inspect.getfile(function)}:{name}", None
    try:
        data = cloudpickle.dumps(function)
    except (TypeError, ValueError, PicklingError) as err:
        raise ConfigError(f"{stem}: {name} cannot be given to a run: {err}") from err
    for used, value in getattr(function, "__globals__", {}).items():
        is_secret = isinstance(value, str) and _SECRET.search(used)
        if is_secret and used.encode() in data and value.encode() in data:
            raise ConfigError(
                f"{stem}: {name} cannot be given to a run: it uses {used}, by its name a secret, "
                "which the run's folder would show: read it from os.environ inside of the function"
            )
    text = _PICKLED.format(stem=stem, name=name, source=_comment(function), data=data)
    file = GivenFile.of(folder, stem, ".py", text)
    return f"{file.path}:{stem}", file


def _comment(function: Callable[..., object]) -> str:
    try:
        return "\n".join(f"#   {line}" for line in inspect.getsource(function).splitlines())
    except (OSError, TypeError):  # typed at a prompt; an object that is called
        return "#   unknown"
