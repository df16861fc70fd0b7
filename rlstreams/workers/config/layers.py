"""Sources of a configuration: TOML files with the ones that they extend, and dotted overrides.

Each layer is checked by itself before anything is merged, so that an error names the file that
holds the value, with line and column.
"""

from __future__ import annotations

import os
import re
import tomllib
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from typing import Any

from rlstreams.streams.log.errors import ConfigError
from rlstreams.workers.config.data import GYM, HUB
from rlstreams.workers.config.fields import (
    FieldError,
    field_type,
    is_free_table,
    item_of,
    split_name,
    types_of,
    wanted,
    wrong,
)
from rlstreams.workers.config.here import CONFIG_FILE
from rlstreams.workers.config.nearest import meant, meant_file, meant_toml
from rlstreams.workers.config.packaged import example
from rlstreams.workers.config.run import START
from rlstreams.workers.config.user_code import TRAINED_BY

Tree = dict[str, Any]
Place = tuple[int, int]  # line and column, from 1

_KEY = r"""(?:[A-Za-z0-9_-]+|"(?:\\.|[^"\\\n])*"|'[^'\n]*')"""
_DOTTED = rf"({_KEY}(?:[ \t]*\.[ \t]*{_KEY})*)[ \t]*"
_STATEMENT = re.compile(rf"[ \t]*((?P<table>\[\[?[ \t]*)?{_DOTTED}(?(table)\]|=))")
_LONG_TEXT = re.compile(r'"""(?:\\.|[^\\])*?"{3,5}|\'{3}.*?\'{3,5}', re.DOTALL)

EXTENDS = "extends"
_EXAMPLE = "example:"  # before the name of a file that comes with the package
_PATHS = frozenset(
    {"data.train", "data.held_out", "data.template", "model.path", "judge.model", "broker.jars_dir"}
    | {"reward.options.schema_file", "reward.options.template_file", "logprob.reference"}
)
_CODE = frozenset({"reward.verifier", "reward.options.parse", "environment.name"})
_CODE |= TRAINED_BY.keys()
_WORDS = {"logprob.reference": START}  # words that may stand in the place of a path
_SECRET = re.compile(
    r"^data\.token$|^weights\.secret$|^broker\.options\..*(password|passphrase|secret|key\.pem|private\.key)$"
    r"|^(engine|agent|judge)\.env\.(?i:.*(token|secret|password|key))$"
    # Of code that we do not know: an `end_token` or an `answer_key` is no secret.
    r"|^(reward|environment|agent)\.options\.(?i:(.*[_-])?(secret|password|passphrase"
    r"|(api|access|private)[_-]?key|(api|access|auth|bearer)[_-]?token)|token)$"
)
_REFERENCES = ("env:", "file:")
_REFERRING = (
    *("broker.options.", "engine.env.", "judge.env.", "reward.options."),
    *("environment.options.", "agent.env.", "agent.options."),
)
_PARTS, _AGENTS = "reward.parts", "agent"
# Arrays of tables with free tables in them, and the section whose rules hold for those.
_ARRAYS = {
    _PARTS: {"options": "reward.options"},
    _AGENTS: {n: f"agent.{n}" for n in ("env", "options")},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One source of values."""

    origin: str
    """File name, or `override --name`."""
    values: Mapping[str, Any]
    """Values by dotted name."""
    places: Mapping[str, Place]
    """Line and column of names and of the tables that hold them, as far as that is known."""

    def at(self, name: str) -> str:
        """`file:line:column` of a field, or of the nearest table around it."""
        keys = name.split(".")
        for length in range(len(keys), 0, -1):
            if place := self.places.get(".".join(keys[:length])):
                return f"{self.origin}:{place[0]}:{place[1]}"
        return self.origin


def file_layers(path: Path, extended: Sequence[Path] = ()) -> list[Layer]:
    """The file's own values, behind those of the files that it extends.

    Args:
        extended: the files that led here.

    Raises:
        ConfigError: missing or malformed; unknown or mistyped fields; files that extend in a ring.
    """
    text = read(path)
    try:
        tree = tomllib.loads(text)
    except tomllib.TOMLDecodeError as err:
        raise ConfigError(f"{path}{_malformed(err, text)}") from err
    layer = Layer(origin=str(path), values={}, places=toml_places(text))
    chain = [*extended, path.resolve()]
    layers: list[Layer] = []
    for base in _bases(tree.pop(EXTENDS, []), layer):
        if base.resolve() in chain:
            ring = " -> ".join(str(p.name) for p in [*chain, base])
            raise ConfigError(f"{layer.at(EXTENDS)}: {EXTENDS} goes round: {ring}")
        if not base.is_file():
            raise ConfigError(f"{layer.at(EXTENDS)}: {EXTENDS} names {base}, which is not there")
        layers += file_layers(base, chain)
    return [*layers, _checked(tree, layer, path.absolute().parent)]


def override_layer(name: str, text: str) -> Layer:
    """One dotted override.

    Raises:
        ConfigError: no such field, or a value of another type.
    """
    layer = Layer(origin=f"override --{name}", values={}, places={})
    try:
        kind = field_type(name.split("."))
    except FieldError as err:
        raise ConfigError(f"{layer.origin}: {err}") from err
    value = _scalar(text)
    if wrong(kind, value) and not wrong(kind, text):
        value = text  # `--run.id 7`: a text that happens to look like a number
    tree: Tree = {}
    put(tree, name, value)
    return _checked(tree, layer, Path.cwd())


def pairs(overrides: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Name and text of each override, however it was written.

    Raises:
        ConfigError: one has no value.
    """
    words = iter(overrides)
    for word in words:
        name, equals, text = word.removeprefix("--").partition("=")
        if not equals:
            following = next(words, None)
            if following is None or following.startswith("--"):
                raise ConfigError(f"override {word} has no value; write {word} VALUE")
            text = following
        yield name, text


def tree_layer(tree: Tree, origin: str, folder: Path = Path("/")) -> Layer:
    """Values from no file and no override; `folder` is that of relative paths in them.

    Raises:
        ConfigError: unknown or mistyped fields.
    """
    return _checked(tree, Layer(origin=origin, values={}, places={}), folder)


def put(tree: Tree, name: str, value: Any) -> None:  # noqa: ANN401
    """Put a value under its dotted name."""
    *tables, leaf = split_name(name)
    for table in tables:
        tree = tree.setdefault(table, {})
    tree[leaf] = value


def read(path: Path) -> str:
    """A file's text.

    Raises:
        ConfigError: it cannot be read, or is not UTF-8.
    """
    try:
        return path.read_text(encoding="utf-8-sig")  # editors of Windows begin with a mark
    except UnicodeDecodeError as err:
        raise ConfigError(f"{path}: byte {err.start} is not UTF-8") from err
    except IsADirectoryError as err:
        raise ConfigError(f"{path} is a folder; {_of_folder(path)}") from err
    except OSError as err:
        near = meant_file(path) if isinstance(err, FileNotFoundError) else ""
        raise ConfigError(f"{path}: cannot be read: {err.strerror}{near}") from err


def _of_folder(path: Path) -> str:
    """Advice on the file to name instead of a folder."""
    if (path / CONFIG_FILE).is_file():
        return f"name its {path / CONFIG_FILE}"
    return "a CONFIG is a TOML file"


def takes_references(name: str) -> bool:
    """Whether `env:NAME` and `file:PATH` mean something in a field."""
    return is_secret(name) or name.startswith(_REFERRING)


def references(name: str, value: object) -> Iterator[tuple[str, str]]:
    """A field's texts that may be references, each with the name to show."""
    for shown, rule, inner in _singly(name, value):
        if isinstance(inner, str) and takes_references(rule):
            yield shown, inner


def is_secret(name: str) -> bool:
    """Whether a field's value must never be written down."""
    return _SECRET.search(name) is not None


def _singly(name: str, value: Any) -> Iterator[tuple[str, str, Any]]:  # noqa: ANN401
    """A field as shown, the one whose rules hold for it, and its value; of arrays their tables."""
    if name not in _ARRAYS:
        yield name, name, value
        return
    for number, part in enumerate(value):
        for table, rule in _ARRAYS[name].items():
            for key, inner in part.get(table, {}).items():
                yield f"{name}[{number}].{table}.{key}", f"{rule}.{key}", inner


def _checked(tree: Tree, layer: Layer, folder: Path) -> Layer:
    values = {name: _located(name, value, folder) for name, value in _leaves(tree, (), layer)}
    return Layer(origin=layer.origin, values=values, places=layer.places)


def _leaves(tree: Tree, above: tuple[str, ...], layer: Layer) -> Iterator[tuple[str, Any]]:
    """Dotted names and values of a layer, each known and well-typed."""
    for key, value in tree.items():
        name = ".".join((*above, key))
        try:
            kind = field_type((*above, key))
        except FieldError as err:
            raise ConfigError(f"{layer.at(name)}: {err}") from err
        if is_dataclass(kind):
            if not isinstance(value, dict):
                raise ConfigError(f"{layer.at(name)}: {name} is a table, got {value!r}")
            yield from _leaves(value, (*above, key), layer)
        elif is_free_table(kind) and isinstance(value, dict):
            item = typing.get_args(kind)[1]
            # `sasl.username = ...` without quotes nests in TOML, but is one property to librdkafka.
            entries = leaves(value, f"{name}.") if item is str else _entries(value, name)
            for entry, inner in entries:
                _check(item, entry, inner, layer)
                yield entry, inner
        else:
            _check(kind, name, value, layer)
            yield name, value


def leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The values of nested tables by dotted name."""
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _entries(tree: Tree, prefix: str) -> Iterator[tuple[str, Any]]:
    return ((f"{prefix}.{key}", value) for key, value in tree.items())


def _check(kind: Any, name: str, value: Any, layer: Layer) -> None:  # noqa: ANN401
    if name not in _ARRAYS:
        _refuse_plain(name, value, layer)
    item = item_of(kind)
    if item is not None and isinstance(value, list):
        for number, table in enumerate(value):
            for key in set(table if isinstance(table, dict) else ()) - set(types_of(item)):
                known = ", ".join(types_of(item))
                raise ConfigError(
                    f"{layer.at(name)}: unknown field {name}[{number}].{key}; known: {known}"
                )
    if why := wrong(kind, value):
        choices = typing.get_args(kind) if typing.get_origin(kind) is typing.Literal else ()
        raise ConfigError(
            f"{layer.at(name)}: {name} must be {wanted(kind)}, got {value!r}{_where_in(why)}"
            f"{meant(str(value), choices)}"
        )
    if name in _ARRAYS:  # known to be tables by now
        _refuse_plain(name, value, layer)


def _refuse_plain(name: str, value: Any, layer: Layer) -> None:  # noqa: ANN401
    """Refuse a secret that would be written down."""
    for shown, rule, inner in _singly(name, value):
        if is_secret(rule) and inner and not str(inner).startswith(_REFERENCES):
            raise ConfigError(
                f"{layer.at(name)}: {shown} is a secret: give it as env:NAME or file:PATH"
            )


def _where_in(why: str) -> str:
    """The part of `why` that the message lacks: the wrong entry of an array, for instance."""
    said, at, entry = why.partition(" - at ")
    if at:
        return f" ({said} at {entry.strip('`').removeprefix('$')})"
    return "" if why.startswith(("Expected", "Invalid enum")) else f" ({why})"


def _located(name: str, value: Any, folder: Path) -> Any:  # noqa: ANN401
    """`value`, with a path in it made absolute against the folder of its layer."""
    if name in _PATHS and isinstance(value, str):
        is_name = value in ("", _WORDS.get(name)) or value.startswith((HUB, GYM))
        return value if is_name else _absolute(value, folder)
    if name == "engine.python" and "/" in value:  # else it is looked up in PATH
        return _absolute(value, folder)
    if name in _CODE:
        return _verifier(value, folder)
    if name in _ARRAYS:
        located = _located_part if name == _PARTS else _located_agent
        return [located(table, folder) for table in value]
    if takes_references(name) and isinstance(value, str) and value.startswith("file:"):
        return f"file:{_absolute(value.removeprefix('file:'), folder)}"
    return value


def _located_part(part: Tree, folder: Path) -> Tree:
    located = {**part, "verifier": _verifier(part["verifier"], folder)}
    if "options" in part:
        items = part["options"].items()
        located["options"] = {key: _located(f"reward.options.{key}", v, folder) for key, v in items}
    return located


def _located_agent(agent: Tree, folder: Path) -> Tree:
    """Files that a command names are those beside the configuration, if they are there."""
    located = dict(agent)
    if "python" in agent:
        located["python"] = _verifier(agent["python"], folder)
    if "command" in agent:
        words = [(word, _absolute(word, folder)) for word in agent["command"]]
        located["command"] = [file if Path(file).is_file() else word for word, file in words]
    for table, rule in _ARRAYS[_AGENTS].items():
        if table in agent:
            items = agent[table].items()
            located[table] = {key: _located(f"{rule}.{key}", v, folder) for key, v in items}
    return located


def _verifier(value: str, folder: Path) -> str:
    file, _, function = value.rpartition(":")
    return f"{_absolute(file, folder)}:{function}" if file.endswith(".py") else value


def _absolute(path: str, folder: Path) -> str:
    return os.path.normpath(folder / os.path.expanduser(path))


def _bases(value: object, layer: Layer) -> Iterator[Path]:
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ConfigError(
            f"{layer.at(EXTENDS)}: {EXTENDS} must be a file name or an array of them, got {value!r}"
        )
    return (_base(name, layer) for name in names)


def _base(name: str, layer: Layer) -> Path:
    if not name.startswith(_EXAMPLE):
        return Path(_absolute(name, Path(layer.origin).parent))
    try:
        return example(name.removeprefix(_EXAMPLE))
    except ConfigError as err:
        raise ConfigError(f"{layer.at(EXTENDS)}: {EXTENDS} names {name!r}: {err}") from err


def _malformed(err: tomllib.TOMLDecodeError, text: str) -> str:
    what, _, where = str(err).partition(" (at ")
    line, column = text.count("\n") + 1, len(text) - text.rfind("\n")
    if found := re.match(r"line (\d+), column (\d+)", where):
        line, column = int(found[1]), int(found[2])
    return f":{line}:{column}: malformed TOML: {what}{meant_toml(what)}"


def toml_places(text: str) -> Mapping[str, Place]:
    """Line and column of each dotted key, which `tomllib` does not give; of one that occurs more
    than once the first. Keys inside inline tables have the place of the key that holds them."""
    places: dict[str, Place] = {}
    table: list[str] = []
    text = _LONG_TEXT.sub(lambda found: re.sub(r"[^\n]", " ", found[0]), text)  # no keys in there
    for number, line in enumerate(text.split("\n"), 1):
        if found := _STATEMENT.match(line):
            keys = [part.strip("\"'") for part in re.findall(_KEY, found[3])]
            table, keys = (keys, keys) if found["table"] else (table, [*table, *keys])
            places.setdefault(".".join(keys), (number, found.start(1) + 1))
    return places


def _scalar(text: str) -> Any:  # noqa: ANN401
    """`text` as a TOML value, or itself where it is none."""
    try:
        tree = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    return tree["value"] if len(tree) == 1 else text
