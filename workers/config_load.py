"""TOML files and dotted overrides into a `RunConfig`, every value with its origin.

Files merge deeply from left to right, overrides come last. Each layer is checked by itself before
it is merged, so that an error names the file that holds it.
"""

from __future__ import annotations

import json
import math
import os
import re
import tomllib
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

import msgspec

from streams.errors import ConfigError
from workers.config import RunConfig

Tree = dict[str, Any]

_TYPES: dict[Any, Mapping[str, Any]] = {}  # of each dataclass, resolved once

_PATHS = frozenset({"data.train", "data.held_out", "model.path", "broker.jars_dir"})
_FREE_TABLES = ("broker.options", "engine.args", "engine.env")  # their names are somebody else's
_SECRET = re.compile(r"(password|passphrase|secret|key\.pem|private\.key)$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A configuration, and who set which field: dotted name -> file or override."""

    config: RunConfig
    origins: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layer:
    """One source of values, by dotted name."""

    origin: str
    values: Mapping[str, Any]


def load(paths: Sequence[str | Path], overrides: Sequence[str] = ()) -> RunConfig:
    """The configuration that `paths` and `overrides` make.

    Args:
        paths: TOML files; later ones win, tables merge.
        overrides: `["trainer.steps=10"]`, `["--trainer.steps=10"]` or `["--trainer.steps", "10"]`.

    Raises:
        ConfigError: a file that is missing or malformed, an unknown, mistyped or impossible field.
    """
    return load_with_origins(paths, overrides).config


def load_with_origins(paths: Sequence[str | Path], overrides: Sequence[str] = ()) -> Loaded:
    """As `load`, with the origin of every value that is not a default."""
    layers = [_file_layer(Path(path)) for path in paths]
    layers += [_override_layer(name, text) for name, text in _pairs(overrides)]
    merged: Tree = {}
    origins: dict[str, str] = {}
    for layer in layers:
        for name, value in layer.values.items():
            _set(merged, name, value)
            origins[name] = layer.origin
    return Loaded(config=_build(merged, origins), origins=origins)


def resolved_json(config: RunConfig) -> str:
    """The whole configuration as JSON; secrets stay the references that they were given as."""
    return json.dumps(msgspec.to_builtins(config), sort_keys=True, separators=(",", ":"))


def from_json(text: str) -> RunConfig:
    """The configuration that `resolved_json` wrote.

    Raises:
        ConfigError: not JSON, or a field that this version does not know.
    """
    origin = "recorded configuration"
    try:
        tree = json.loads(text)
    except json.JSONDecodeError as err:
        raise ConfigError(f"{origin}: line {err.lineno}, column {err.colno}: {err.msg}") from err
    if not isinstance(tree, dict):
        raise ConfigError(f"{origin}: must be an object, got {type(tree).__name__}")
    values = dict(_leaves(RunConfig, tree, "", origin))
    merged: Tree = {}
    for name, value in values.items():
        _set(merged, name, value)
    return _build(merged, dict.fromkeys(values, origin))


def resolve_secret(value: str) -> str:
    """`env:NAME` -> the variable, `file:PATH` -> the file without its last newline, else `value`.

    Raises:
        ConfigError: the variable is not set, or the file cannot be read.
    """
    kind, _, name = value.partition(":")
    if kind == "env":
        if name not in os.environ:
            raise ConfigError(f"environment variable {name} is not set (wanted by {value!r})")
        return os.environ[name]
    if kind == "file":
        return _read(Path(name)).rstrip("\r\n")
    return value


def _build(tree: Tree, origins: Mapping[str, str]) -> RunConfig:
    """The dataclasses; what their own checks refuse is prefixed with the field's origin."""
    try:
        config = msgspec.convert(tree, RunConfig)
        _check_across(config)
    except msgspec.ValidationError as err:
        raise ConfigError(f"configuration: {err}") from err
    except ConfigError as err:
        named = [name for name in origins if re.search(rf"(?<![\w.]){re.escape(name)}\b", str(err))]
        prefix = ", ".join(dict.fromkeys(origins[name] for name in named))
        raise ConfigError(f"{prefix}: {err}" if prefix else str(err)) from err
    return config


def _check_across(config: RunConfig) -> None:
    """What one section asks of another."""
    trainer, prompts, longest = config.trainer, config.prompts, config.rollout.max_new_tokens
    if trainer.min_group_samples > prompts.group_size:
        raise ConfigError(
            f"trainer.min_group_samples is {trainer.min_group_samples}, "
            f"but prompts.group_size is {prompts.group_size}: no group could be trained"
        )
    if prompts.evaluate_every and not config.data.held_out:
        raise ConfigError(
            f"prompts.evaluate_every is {prompts.evaluate_every}, "
            "but data.held_out is empty: there is nothing to evaluate on"
        )
    if 0 < len(config.engine.urls) < config.rollout.workers:
        raise ConfigError(
            f"engine.urls names {len(config.engine.urls)} servers, but rollout.workers is "
            f"{config.rollout.workers}: a server belongs to one worker"
        )
    if config.rollout.engine == "vllm" and config.rollout.temperature > 2:
        raise ConfigError(
            f"rollout.temperature is {config.rollout.temperature}, but vLLM takes at most 2"
        )
    if config.rollout.engine == "sglang" and (config.rollout.top_p < 1 or config.rollout.top_k):
        raise ConfigError(
            "rollout.top_p and rollout.top_k must be off with rollout.engine = 'sglang': it "
            "reports log-probs of the uncut distribution, not of the one that it samples from"
        )
    if trainer.micro_batch_tokens <= longest:
        raise ConfigError(
            f"trainer.micro_batch_tokens is {trainer.micro_batch_tokens}, "
            f"but rollout.max_new_tokens is {longest}: the longest sample would fit no micro-batch"
        )


def _file_layer(path: Path) -> _Layer:
    text = _read(path)
    try:
        tree = tomllib.loads(text)
    except tomllib.TOMLDecodeError as err:
        what, _, where = str(err).partition(" (at ")
        where = where.rstrip(")") or "line 1, column 1"
        if where == "end of document":
            lines = text.split("\n")
            where = f"line {len(lines)}, column {len(lines[-1]) + 1}"
        raise ConfigError(f"{path}: {where}: malformed TOML: {what}") from err
    folder = path.absolute().parent
    values = {
        name: _located(name, value, folder)
        for name, value in _leaves(RunConfig, tree, "", str(path))
    }
    return _Layer(origin=str(path), values=values)


def _override_layer(name: str, text: str) -> _Layer:
    origin = f"override --{name}"
    kind, path = _field(name.split("."), origin)
    value = _scalar(text)
    if _wrong(kind, value) and not _wrong(kind, text):
        value = text  # `--run.id 7`: a text that happens to look like a number
    tree: Tree = {}
    _set(tree, path, value)
    folder = Path.cwd()
    values = {n: _located(n, v, folder) for n, v in _leaves(RunConfig, tree, "", origin)}
    return _Layer(origin=origin, values=values)


def _pairs(overrides: Sequence[str]) -> Iterator[tuple[str, str]]:
    words = iter(overrides)
    for word in words:
        name, equals, text = word.removeprefix("--").partition("=")
        if not equals:
            following = next(words, None)
            if following is None:
                raise ConfigError(f"override {word} has no value; write {word} VALUE")
            text = following
        yield name, text


def _scalar(text: str) -> Any:  # noqa: ANN401
    """`text` as a TOML value, or itself where it is none."""
    try:
        tree = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    return tree["value"] if len(tree) == 1 else text


def _leaves(cls: type, tree: Tree, prefix: str, origin: str) -> Iterator[tuple[str, Any]]:
    """Dotted names and values of a layer, each known and well-typed."""
    for key, value in tree.items():
        kind, name = _field([*prefix.split("."), key] if prefix else [key], origin)
        if is_dataclass(kind) and isinstance(kind, type):
            if not isinstance(value, dict):
                raise ConfigError(f"{origin}: {name} is a table, got {value!r}")
            yield from _leaves(kind, value, name, origin)
        elif typing.get_origin(kind) is dict and isinstance(value, dict):
            item = typing.get_args(kind)[1]
            for option, found in _flat(value, name):
                _check(item, option, found, origin)
                yield option, found
        else:
            _check(kind, name, value, origin)
            yield name, value


def _flat(tree: Tree, prefix: str) -> Iterator[tuple[str, Any]]:
    """`sasl.username = ...` without quotes nests in TOML, but is one property to librdkafka."""
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}.{key}")
        else:
            yield f"{prefix}.{key}", value


def _check(kind: Any, name: str, value: Any, origin: str) -> None:  # noqa: ANN401
    secret = name.startswith("broker.options.") and _SECRET.search(name)
    if secret and not str(value).startswith(("env:", "file:")):
        raise ConfigError(f"{origin}: {name} is a secret: give it as env:NAME or file:PATH")
    if wrong := _wrong(kind, value):
        raise ConfigError(f"{origin}: {name} must be {_wanted(kind)}, got {value!r} ({wrong})")
    item = next(iter(typing.get_args(kind)), None)
    if is_dataclass(item) and isinstance(value, list):
        for number, table in enumerate(value):
            for key in set(table) - set(_types(item)):
                known = ", ".join(_types(item))
                raise ConfigError(f"{origin}: unknown field {name}[{number}].{key}; known: {known}")


def _wrong(kind: Any, value: Any) -> str:  # noqa: ANN401
    """Why `value` is no `kind`; empty if it is one."""
    if isinstance(value, float) and not math.isfinite(value):
        return "not a finite number"
    try:
        msgspec.convert(value, kind)
    except msgspec.ValidationError as err:
        return str(err)
    return ""


def _wanted(kind: Any) -> str:  # noqa: ANN401
    if typing.get_origin(kind) is typing.Literal:
        return "one of " + ", ".join(repr(choice) for choice in typing.get_args(kind))
    if typing.get_origin(kind) is tuple:
        return "an array"
    names = {str: "text", int: "a whole number", float: "a number", bool: "true or false"}
    return names.get(kind, str(kind))


def _field(names: Sequence[str], origin: str) -> tuple[Any, str]:
    """The type of a dotted field and its name; of a free table, the type of its values."""
    kind: Any = RunConfig
    for depth, name in enumerate(names):
        if typing.get_origin(kind) is dict:
            return typing.get_args(kind)[1], ".".join(names)
        known = _types(kind) if is_dataclass(kind) else {}
        if name not in known:
            here, wanted = ".".join(names[:depth]), ".".join(names[: depth + 1])
            raise ConfigError(f"{origin}: unknown field {wanted}{_nearest(here, name)}")
        kind = known[name]
    return kind, ".".join(names)


def _types(cls: Any) -> Mapping[str, Any]:  # noqa: ANN401
    if cls not in _TYPES:
        hints = typing.get_type_hints(cls)
        _TYPES[cls] = {f.name: hints[f.name] for f in fields(cls)}
    return _TYPES[cls]


def _all_names(cls: Any, prefix: str = "") -> Iterator[str]:  # noqa: ANN401
    for name, kind in _types(cls).items():
        yield f"{prefix}{name}"
        if is_dataclass(kind):
            yield from _all_names(kind, f"{prefix}{name}.")


def _nearest(section: str, name: str) -> str:
    """`; did you mean ...?`: a like name here, else the same name elsewhere, else the likest."""
    import difflib

    known = list(_all_names(RunConfig))
    dotted = f"{section}.{name}" if section else name
    siblings = [n for n in known if n.rpartition(".")[0] == section]
    namesakes = [n for n in known if n.rpartition(".")[2] == name]
    # The namesake in a section below this one is meant more often than one far away.
    namesakes.sort(key=lambda n: not n.startswith(f"{section}."))
    close = (
        difflib.get_close_matches(dotted, siblings, n=1, cutoff=0.85)
        or namesakes
        or difflib.get_close_matches(dotted, siblings, n=1)
        or difflib.get_close_matches(dotted, known, n=1)
    )
    return f"; did you mean {close[0]}?" if close else ""


def _located(name: str, value: Any, folder: Path) -> Any:  # noqa: ANN401
    """`value`, with a path in it made absolute against the folder of who set it."""
    if name in _PATHS:
        return _absolute(value, folder) if value else value
    if name == "engine.python" and "/" in value:  # else it is looked up in PATH
        return _absolute(value, folder)
    if name == "reward.verifier" and ".py:" in value:
        file, _, function = value.rpartition(":")
        return f"{_absolute(file, folder)}:{function}"
    if name.startswith("broker.options.") and value.startswith("file:"):
        return f"file:{_absolute(value.removeprefix('file:'), folder)}"
    return value


def _absolute(path: str, folder: Path) -> str:
    return os.path.normpath(folder / Path(path).expanduser())


def _set(tree: Tree, name: str, value: Any) -> None:  # noqa: ANN401
    """Put a value under its dotted name; what lies below a free table keeps its dots."""
    *sections, leaf = name.split(".")
    for table in _FREE_TABLES:
        if name.startswith(f"{table}."):
            sections, leaf = table.split("."), name.removeprefix(f"{table}.")
    for section in sections:
        tree = tree.setdefault(section, {})
    tree[leaf] = value


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as err:
        raise ConfigError(f"{path}: byte {err.start} is not UTF-8") from err
    except OSError as err:
        raise ConfigError(f"{path}: cannot be read: {err.strerror}") from err
