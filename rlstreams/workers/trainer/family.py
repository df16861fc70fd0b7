"""Text on a branch and its parent: the step where it begins, changed settings, the command."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence

from rlstreams.schemas.events import RunBranched
from rlstreams.streams.log.errors import ConfigError
from rlstreams.workers.config.layers import leaves
from rlstreams.workers.config.load import from_json, tree_of

# Each run has its own values for these, even a branch.
_OWN = ("run.id", "run.dir", "broker.", "demo.")
Changed = tuple[str, object, object]  # dotted name, old value, new value


def differing(before: str, now: str) -> list[Changed]:
    """Fields of two recorded configurations, JSON, that differ; None: no such field.

    A field that an earlier release did not know has the value that it computed with.
    """
    old, new = computed_with(before), computed_with(now)
    names = sorted(old.keys() | new.keys())
    return [(n, old.get(n), new.get(n)) for n in names if old.get(n) != new.get(n)]


def computed_with(config: str) -> dict[str, object]:
    """Every field of a recorded configuration by dotted name; of one that this release does not
    know, the fields that it has, and of one that names none, none."""
    found = json.loads(config)
    try:
        return dict(leaves(tree_of(from_json(config)) if found else {}))
    except ConfigError:
        return dict(leaves(found))


def changed_since(branch: RunBranched, config: str) -> list[Changed]:
    """Settings that a branch computes with and its parent did not at that step."""
    return [one for one in differing(branch.config, config) if not one[0].startswith(_OWN)]


def changed_text(found: Sequence[Changed]) -> str:
    """Text of changes: `trainer.optimizer.lr 0.0001 (was 0.0003)`, or `nothing`."""
    return "; ".join(f"{name} {is_} (was {was})" for name, was, is_ in found) or "nothing"


def branch_line(branch: RunBranched, config: str) -> str:
    """Parent and step of a branch, and its changes by the newest claim's configuration."""
    base = f"branch of {branch.parent} at step {branch.step}, weights {branch.weight_hash[:12]}"
    changed = f", changed: {changed_text(changed_since(branch, config))}" if config else ""
    return base + changed


def branch_command(place: str, step: int) -> str:
    """The command for a branch of the run or recording at that place."""
    return f"rlstreams replay branch {shlex.quote(place)} --at {step}"


def of_parent(branch: RunBranched, step: int) -> str:
    """Reason that a step is not in a branch, and the run that has it."""
    return (
        f"step {step} is not of run {branch.run!r}, but of its parent: it is a branch of "
        f"{branch.parent!r} at step {branch.step}, and its own steps begin behind it"
    )
