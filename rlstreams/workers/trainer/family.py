"""A branch and its parent in words: where it begins, which settings differ, what makes it again."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence

from rlstreams.schemas.events import RunBranched
from rlstreams.workers.config.layers import leaves

# Each run has its own of these, whatever it goes on from.
_OWN = ("run.id", "run.dir", "broker.", "demo.")
Changed = tuple[str, object, object]  # dotted name, old value, new value


def differing(before: str, now: str) -> list[Changed]:
    """Fields of two resolved configurations, JSON, that differ; None: it has no such field."""
    old, new = dict(leaves(json.loads(before))), dict(leaves(json.loads(now)))
    names = sorted(old.keys() | new.keys())
    return [(n, old.get(n), new.get(n)) for n in names if old.get(n) != new.get(n)]


def changed_since(branch: RunBranched, config: str) -> list[Changed]:
    """What a branch computes with otherwise than its parent did at that step."""
    return [one for one in differing(branch.config, config) if not one[0].startswith(_OWN)]


def changed_text(found: Sequence[Changed]) -> str:
    """`trainer.optimizer.lr 0.0001 (was 0.0003)`, or `nothing`."""
    return "; ".join(f"{name} {is_} (was {was})" for name, was, is_ in found) or "nothing"


def branch_line(branch: RunBranched, config: str = "") -> str:
    """Whose branch it is; with the resolved configuration of its newest claim what it changed."""
    base = f"branch of {branch.parent} at step {branch.step}, weights {branch.weight_hash[:12]}"
    changed = f", changed: {changed_text(changed_since(branch, config))}" if config else ""
    return base + changed


def branch_command(place: str, step: int) -> str:
    """What to type for a branch of the run or recording that lies there."""
    return f"rlstreams replay branch {shlex.quote(place)} --at {step}"


def of_parent(branch: RunBranched, step: int) -> str:
    """Why a step is not in a branch, and where it is."""
    return (
        f"step {step} is not of run {branch.run!r}, but of its parent: it is a branch of "
        f"{branch.parent!r} at step {branch.step}, and its own steps begin behind it"
    )
