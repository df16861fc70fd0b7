"""User code as the configuration names it, and the free tables that it is called with."""

from __future__ import annotations

import ast
import hashlib
import math
import re
import sys
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from rlstreams.streams.digests import file_sha256
from rlstreams.streams.log.errors import ConfigError
from rlstreams.streams.log.secrets import resolve_secret
from rlstreams.workers.config.checks import Must
from rlstreams.workers.config.nearest import meant_path

# Any: what lies inside arrays and tables is for its receiver to judge.
Option: TypeAlias = str | int | float | bool | list[Any] | dict[str, Any]
Own: TypeAlias = tuple[str, str, dict[str, Option]]  # full name of a field, function, its options
SOURCE_MAX_BYTES = 1_000_000  # of source text in a claim
LOSS, ADVANTAGE, OPTIMIZER = (
    "trainer.loss.kind",
    "trainer.loss.advantage",
    "trainer.optimizer.kind",
)
# Fields that may name a function which the trainer runs, and the field of each one's options.
TRAINED_BY = {
    LOSS: "trainer.loss.options",
    ADVANTAGE: "trainer.loss.advantage_options",
    OPTIMIZER: "trainer.optimizer.options",
}
# `file.py:name` or `module:name`, in the regular expressions that Python and editors share: these
# do not agree on the letters of a name, so it admits more than `located`.
_LOCATED = r"^(.*\.py|[^\s:/]+):[^\s:/.-]+$"


def resolved(options: Mapping[str, Option], field: str) -> dict[str, Option]:
    """The options with `env:NAME` and `file:PATH` replaced by the values that they name.

    Args:
        field: in front of an option's name, for messages.

    Raises:
        ConfigError: a variable is not set, or a file cannot be read.
    """
    return {
        name: resolve_secret(value, f"{field}{name}") if isinstance(value, str) else value
        for name, value in options.items()
    }


def located(name: str) -> tuple[str, str, str] | None:
    """File, module and name of `file.py:name` or `module:name`; None: it is neither."""
    place, colon, code = name.rpartition(":")
    if not colon or not code.isidentifier():
        return None
    if place.endswith(".py"):
        return str(Path(place).resolve()), "", code
    return ("", place, code) if re.fullmatch(r"\w+(\.\w+)*", place) else None


def ours_or_own(names: Sequence[str]) -> Must:
    """One of our names, or a function of the user's."""
    return Must(
        f"one of {', '.join(map(repr, names))}, or your `file.py:function` or `module:function`",
        lambda value: value in names or located(value) is not None,
        names,
        _LOCATED,
    )


def code_hashes(name: str) -> dict[str, str]:
    """SHA-256, hexadecimal, of the files that `code_files` finds."""
    return {path: hashlib.sha256(text).hexdigest() for path, text in code_files(name).items()}


def code_files(name: str, most_bytes: float = math.inf) -> dict[str, bytes]:
    """Content of the files that `file.py:name` or `module:name` runs.

    These are the file itself, and what it imports from beside it, or of an installed package from
    the same package; in turn, with the packages that they lie in. Nothing is run.

    Args:
        most_bytes: no more are looked for once those found are larger.

    Returns:
        By path relative to the folder where imports begin; empty: `name` is neither, or not here.
    """
    file, module, _ = located(name) or ("", "", "")
    places = [Path(file)] if file else list(_found(module))
    places = [place for place in places if place.is_file()]
    if not places:
        return {}
    root = Path(file).parent if file else places[0].parents[module.count(".")]
    if places[0].name == "__init__.py" and not file:
        root = root.parent
    top = "" if file or not _is_installed(root) else module.partition(".")[0]
    found: dict[str, bytes] = {}
    while places and sum(map(len, found.values())) <= most_bytes:
        place = places.pop()
        path = place.relative_to(root).as_posix()
        if path not in found and top in ("", path.split("/")[0].removesuffix(".py")):
            found[path] = place.read_bytes()
            places += _imported(place, found[path], root)
    return found


def source_texts(field: str, name: str) -> dict[str, str]:
    """Text of the files of `code_files`, by `FIELD: PATH`, for the log.

    Raises:
        ConfigError: there is no such file; one is not UTF-8; all together are too long.
    """
    files = code_files(name, SOURCE_MAX_BYTES)
    if not files:
        file, module, _ = located(name) or ("", name, "")
        near = meant_path(file) if file else f", nor in {Path.cwd()}"
        where = "is not there" if file else f"is no module of {sys.prefix}"
        raise ConfigError(f"{field} is {name!r}: {file or module} {where}{near}")
    if sum(map(len, files.values())) > SOURCE_MAX_BYTES:
        raise ConfigError(
            f"{field} is {name!r}, of which the log keeps all files that it imports: they have "
            f"more than {SOURCE_MAX_BYTES:,} bytes, which is the most that is kept; copy the "
            "function into a file that imports less of its package"
        )
    texts: dict[str, str] = {}
    for path, content in files.items():
        try:
            texts[f"{field}: {path}"] = content.decode("utf-8")
        except UnicodeDecodeError as err:
            raise ConfigError(f"{field}: {path}: byte {err.start} is not UTF-8") from err
    return texts


def docstring_of(text: str, function: str) -> str | None:
    """First line of a function's docstring, "" without one; None: the text defines no such name."""
    try:
        nodes = ast.parse(text.removeprefix("\ufeff")).body
    except (SyntaxError, ValueError):
        return ""  # its loader reports that
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == function:
            return (ast.get_docstring(node) or "").partition("\n")[0]
    names = {n.id for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Name)}
    imported = {
        alias.asname or alias.name
        for node in nodes
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    return "" if function in names | imported else None


def option_hashes(section: str, options: Mapping[str, Option]) -> dict[str, str]:
    """SHA-256 of files that options name: a judge's `parse`, any `*_file`, such as its template.

    Returns:
        By `{section}.{option}: {file}`; without files that are not here.
    """
    parse = code_hashes(str(options.get("parse", "")))
    found = {f"{section}.parse: {path}": digest for path, digest in parse.items()}
    for name, value in options.items():
        if name.endswith("_file") and isinstance(value, str) and (file := Path(value)).is_file():
            digest = file_sha256(file)
            found[f"{section}.{name}: {file.name}"] = digest
    return found


def _found(module: str) -> Iterator[Path]:
    """The file of a module, as an import would find it, and those of the packages that it lies in,
    from within; none: there is no such."""
    for folder in [*sys.path, str(Path.cwd())]:
        if module and (files := _files(Path(folder or "."), module)):
            yield from (file.resolve() for file in reversed(files))
            return


def _files(folder: Path, dotted: str) -> list[Path]:
    """Files of a module and of the packages that it lies in; empty: there is no such."""
    parts = dotted.split(".")
    files: list[Path] = []
    for num in range(1, len(parts) + 1):
        place = folder.joinpath(*parts[:num])
        either = (place / "__init__.py", place.parent / f"{place.name}.py")
        files += [file for file in either if file.is_file()][:1]
        if num == len(parts) and not any(file.is_file() for file in either):
            return []
    return files


def _imported(place: Path, content: bytes, root: Path) -> Iterator[Path]:
    try:
        nodes = list(ast.walk(ast.parse(content)))
    except (SyntaxError, ValueError):
        return  # its loader reports that
    for node in nodes:
        if isinstance(node, ast.Import):
            base, names = root, [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = place.parents[node.level - 1] if node.level else root
            prefix = f"{node.module}." if node.module else ""
            names = [
                *([node.module] if node.module else []),
                *(prefix + a.name for a in node.names),
            ]
        else:
            continue
        for name in names:
            yield from (file for file in _files(base, name) if file.is_relative_to(root))


def _is_installed(folder: Path) -> bool:
    places = {sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")}
    return str(folder) in places
