"""What changed between a run's last claim and the configuration that is to continue it. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from rlstreams.streams.log.errors import ConfigError

# Another seed is another order of rows and other samples: not the run that the log tells.
# Data set, tokenizer and model are compared by content, by the trainer; partitions by the broker.
# These, and the seed, the trainer would refuse too, but after other roles had begun.
FIXED = ("run.seed", "model.dtype", "prompts.group_size", "trainer.lora")


def changes(before: str, now: str) -> list[tuple[str, object, object]]:
    """Fields that differ, by dotted name, with the old and the new value.

    Args:
        before: configuration of the last claim, JSON.
        now: the resolved configuration, JSON.

    Raises:
        ConfigError: a field that may not change did.
    """
    old, new = dict(_leaves(json.loads(before))), dict(_leaves(json.loads(now)))
    found = [
        (name, old.get(name), new.get(name))
        for name in sorted(old.keys() | new.keys())
        if old.get(name) != new.get(name)
    ]
    for name, was, is_ in found:
        # What a version before did not know has the value that it computed with: the trainer knows.
        if name in old and any(f"{name}.".startswith(f"{fixed}.") for fixed in FIXED):
            raise ConfigError(
                f"{name} is {is_}, but the run was started with {was}: "
                "restore it, or choose another run.id"
            )
    return found


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, object]]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value
