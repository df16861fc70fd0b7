"""A configuration with a few settings of the trainer changed, for an offline experiment."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Sequence
from typing import Any

from rlstreams.streams.log.errors import ConfigError
from rlstreams.workers.config.load import from_json, resolved_json
from rlstreams.workers.config.run import RunConfig

# What a step computes with, once its samples are chosen. Everything else was decided before.
CHANGEABLE = ("trainer.loss.", "trainer.optimizer.")
ALSO = (
    "trainer.micro_batch_tokens",
    "trainer.minibatches",
    "trainer.batch_epochs",
    "trainer.control",
)


def changed_config(config: RunConfig, settings: Sequence[str]) -> RunConfig:
    """`config` with `["trainer.loss.clip_high=0.3"]`.

    Raises:
        ConfigError: an unknown or impossible setting, or one that changes nothing in a step whose
            samples are chosen already.
    """
    tree = json.loads(resolved_json(config))
    for setting in settings:
        name, equals, text = setting.partition("=")
        if not equals:
            raise ConfigError(f"--set takes NAME=VALUE, got {setting!r}")
        if not name.startswith(CHANGEABLE) and name not in ALSO:
            raise ConfigError(
                f"--set {name}: the samples of a recorded step are chosen already, so only "
                f"{', '.join(f'{n}*' for n in CHANGEABLE)}, {', '.join(ALSO)} can change it"
            )
        section = tree
        *path, leaf = name.split(".")
        for part in path:
            section = section.setdefault(part, {})
        section[leaf] = _value(text)
    return from_json(json.dumps(tree))


def _value(text: str) -> Any:  # noqa: ANN401
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
