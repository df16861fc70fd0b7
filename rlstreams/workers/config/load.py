"""TOML files and dotted overrides into a `RunConfig`, every value with its origin.

Files merge deeply from left to right, each behind what it extends; overrides come last.
"""

from __future__ import annotations

import functools
import json
import operator
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from rlstreams.streams.log.errors import ConfigError
from rlstreams.streams.log.secrets import resolve_secret
from rlstreams.streams.run.places import CONFIG_FILE, what_is
from rlstreams.workers.config.across import check_across, check_start
from rlstreams.workers.config.fields import REMOVED, FieldError
from rlstreams.workers.config.layers import (
    Layer,
    Tree,
    file_layers,
    override_layer,
    pairs,
    put,
    references,
    tree_layer,
)
from rlstreams.workers.config.run import RunConfig
from rlstreams.workers.config.user_code import TRAINED_BY

# Values of fields before they existed, where their default is another one.
BEFORE: Mapping[str, Any] = {
    "trainer.loss.clip_dual": 0.0,
    "trainer.loss.lone": "reward",
    "trainer.shared_prefixes": False,
    "logprob.shared_prefixes": False,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A layer's value of a field, and its place."""

    value: Any  # as the layer has it; a secret is a reference
    place: str  # `file:line:column`, or the override


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A configuration, and the layers that set each field."""

    config: RunConfig
    history: Mapping[str, tuple[Setting, ...]]
    """Settings by dotted name, first to last: the last one counts. Defaults are not in it."""

    @property
    def origins(self) -> Mapping[str, str]:
        """Place of each value that is no default, by dotted name."""
        return {name: settings[-1].place for name, settings in self.history.items()}


def load(paths: Sequence[str | Path], overrides: Sequence[str] = ()) -> RunConfig:
    """The configuration that `paths` and `overrides` make.

    Args:
        paths: TOML files, or a run's folder; later ones win, tables merge.
        overrides: `["trainer.steps=10"]`, `["--trainer.steps=10"]` or `["--trainer.steps", "10"]`.

    Raises:
        ConfigError: a file that is missing or malformed, an unknown, mistyped or impossible field.
    """
    return load_with_origins(paths, overrides).config


def load_with_origins(paths: Sequence[str | Path], overrides: Sequence[str] = ()) -> Loaded:
    """As `load`, with the origin of every value that is not a default."""
    layers = [layer for path in paths for layer in _layers(Path(path))]
    layers += [override_layer(name, text) for name, text in pairs(overrides)]
    return merged(layers)


def _layers(path: Path) -> Sequence[Layer]:
    """Layers of a TOML file and of those that it extends; of a run's folder its `config.json`."""
    if what_is(path) != "a run":
        return file_layers(path)
    config = read_json(path / CONFIG_FILE)
    # The folder may have been moved, or named from elsewhere, since it was written.
    here = replace(config, run=replace(config.run, dir=str(path)))
    return [tree_layer(tree_of(here), str(path / CONFIG_FILE))]


def resolved_json(config: RunConfig) -> str:
    """The whole configuration as JSON; secrets stay the references that they were given as."""
    return json.dumps(msgspec.to_builtins(config), sort_keys=True, separators=(",", ":"))


def tree_of(config: RunConfig) -> dict[str, Any]:
    """The whole configuration as JSON's values, by section; see `resolved_json`."""
    tree: dict[str, Any] = json.loads(resolved_json(config))
    return tree


def from_json(text: str, origin: str = "recorded configuration") -> RunConfig:
    """The configuration that `resolved_json` wrote, perhaps an earlier version of this code.

    A field that this version did not know yet gets the value that it computed with, so that its
    steps are redone as they were; `check_start` is left out.

    Args:
        origin: where the text comes from, for messages.

    Raises:
        ConfigError: not JSON, or a field that this version does not know.
    """
    try:
        tree = json.loads(text)
    except json.JSONDecodeError as err:
        raise ConfigError(f"{origin}: line {err.lineno}, column {err.colno}: {err.msg}") from err
    if not isinstance(tree, dict):
        raise ConfigError(f"{origin}: must be an object, got {type(tree).__name__}")
    for name, value in BEFORE.items():
        section, leaf = _section_of(tree, name)
        section.setdefault(leaf, value)
    for name in REMOVED:
        section, leaf = _section_of(tree, name)
        section.pop(leaf, None)
    weights, snapshot = _section_of(tree, "weights.snapshot")
    if weights.get(snapshot) == "none":  # a place that is no more
        del weights[snapshot]
    return merged([tree_layer(tree, origin)], is_start=False).config


def _section_of(tree: dict[str, Any], name: str) -> tuple[dict[str, Any], str]:
    """The table of a dotted name, and its last part; a table of its own where there is none."""
    *path, leaf = name.split(".")
    section: Any = tree
    for part in path:
        section = section.get(part) if isinstance(section, dict) else None
    return (section if isinstance(section, dict) else {}), leaf


def read_json(path: Path) -> RunConfig:
    """The configuration that `up` left in a file.

    Raises:
        ConfigError: it cannot be read, was cut short, or has a field that is not known; names it.
    """
    try:
        return from_json(path.read_text(encoding="utf-8"), str(path))
    except OSError as err:
        raise ConfigError(f"{path}: cannot be read: {err.strerror}") from err
    except UnicodeDecodeError as err:
        raise ConfigError(f"{path}: not UTF-8 text: {err}") from err
    except ConfigError as err:
        if not isinstance(err.__cause__, FieldError):
            raise
        newer = "a newer rlstreams than this one wrote it: take that one"
        raise ConfigError(f"{err}; {newer}") from err


def tree_to_change(config: RunConfig, fields: Collection[str]) -> dict[str, Any]:
    """As `tree_of`, without the options of a function that `fields` put another in the place of."""
    tree = tree_of(config)
    for field, options in TRAINED_BY.items():
        if field in fields:
            *tables, last = options.split(".")
            functools.reduce(operator.getitem, tables, tree)[last] = {}
    return tree


def over(config: RunConfig, overrides: Sequence[str], origin: str) -> RunConfig:
    """A configuration that is there, with overrides over it.

    Args:
        overrides: as for `load`.
        origin: where the configuration comes from, for messages.

    Raises:
        ConfigError: an unknown, mistyped or impossible field.
    """
    left = tree_layer(tree_of(config), origin)
    own = [override_layer(name, text) for name, text in pairs(overrides)]
    return merged([left, *own], is_start=False).config


def check_secrets(loaded: Loaded) -> None:
    """Resolve every reference to a secret, so that one which is not set is reported before a start.

    Raises:
        ConfigError: names the place, the field and what is not there.
    """
    for name, settings in loaded.history.items():
        for shown, text in references(name, settings[-1].value):
            try:
                resolve_secret(text, shown)
            except ConfigError as err:
                raise ConfigError(f"{settings[-1].place}: {err}") from err


def merged(layers: Sequence[Layer], *, is_start: bool = True) -> Loaded:
    """The configuration that layers make, later ones over earlier ones.

    Args:
        is_start: check it as a start does, too.
    """
    tree: Tree = {}
    history: dict[str, tuple[Setting, ...]] = {}
    for layer in layers:
        for name, value in layer.values.items():
            put(tree, name, value)
            setting = Setting(value=value, place=layer.at(name))
            history[name] = (*history.get(name, ()), setting)
    loaded = {name: settings[-1].place for name, settings in history.items()}
    return Loaded(config=_build(tree, loaded, is_start=is_start), history=history)


def _build(tree: Tree, origins: Mapping[str, str], *, is_start: bool) -> RunConfig:
    """The dataclasses; what their own checks refuse is prefixed with the field's origin."""
    try:
        config = msgspec.convert(tree, RunConfig)
        check_across(config)
        if is_start:
            check_start(config)
    except msgspec.ValidationError as err:
        raise ConfigError(f"configuration: {err}") from err
    except ConfigError as err:
        named = [name for name in origins if re.search(rf"(?<![\w.]){re.escape(name)}\b", str(err))]
        prefix = ", ".join(dict.fromkeys(origins[name] for name in named))
        raise ConfigError(f"{prefix}: {err}" if prefix else str(err)) from err
    return config
