"""TOML files and dotted overrides into a `RunConfig`, every value with its origin.

Files merge deeply from left to right, each behind what it extends; overrides come last.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from streams.errors import ConfigError
from streams.secrets import resolve_secret
from workers.config.layers import (
    Layer,
    Tree,
    file_layers,
    override_layer,
    pairs,
    put,
    takes_references,
    tree_layer,
)
from workers.config.run import RunConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One layer's word on a field."""

    value: Any  # as the layer has it; a secret is a reference
    place: str  # `file:line:column`, or the override


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A configuration, and who set which field."""

    config: RunConfig
    history: Mapping[str, tuple[Setting, ...]]
    """By dotted name, first to last: the last one counts. Defaults are not in it."""

    @property
    def origins(self) -> Mapping[str, str]:
        """Where each value that is no default comes from, by dotted name."""
        return {name: settings[-1].place for name, settings in self.history.items()}


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
    layers = [layer for path in paths for layer in file_layers(Path(path))]
    layers += [override_layer(name, text) for name, text in pairs(overrides)]
    return _merged(layers)


def resolved_json(config: RunConfig) -> str:
    """The whole configuration as JSON; secrets stay the references that they were given as."""
    return json.dumps(msgspec.to_builtins(config), sort_keys=True, separators=(",", ":"))


def from_json(text: str, origin: str = "recorded configuration") -> RunConfig:
    """The configuration that `resolved_json` wrote.

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
    return _merged([tree_layer(tree, origin)]).config


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


def check_secrets(loaded: Loaded) -> None:
    """Resolve every reference to a secret, so that one which is not set is told before a start.

    Raises:
        ConfigError: names the place, the field and what is not there.
    """
    for name, settings in loaded.history.items():
        value = settings[-1].value
        if isinstance(value, str) and takes_references(name):
            try:
                resolve_secret(value, name)
            except ConfigError as err:
                raise ConfigError(f"{settings[-1].place}: {err}") from err


def _merged(layers: Sequence[Layer]) -> Loaded:
    tree: Tree = {}
    history: dict[str, tuple[Setting, ...]] = {}
    for layer in layers:
        for name, value in layer.values.items():
            put(tree, name, value)
            setting = Setting(value=value, place=layer.at(name))
            history[name] = (*history.get(name, ()), setting)
    loaded = {name: settings[-1].place for name, settings in history.items()}
    return Loaded(config=_build(tree, loaded), history=history)


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
    if prompts.evaluate_every and not config.data.has_held_out:
        raise ConfigError(
            f"prompts.evaluate_every is {prompts.evaluate_every}, "
            "but data.held_out is empty: there is nothing to evaluate on; name a file, or set "
            "data.held_out_rows or data.held_out_fraction"
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
