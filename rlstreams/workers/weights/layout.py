"""Layout of a version: names, dtypes, shapes; and the one definition of its hash.

Tensors travel and are hashed in name order. Trainer, servers and receivers all use these
functions, so a hash computed anywhere means the same content everywhere.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING

from rlstreams.workers.weights.channel import WeightError, WeightManifest

if TYPE_CHECKING:
    import torch

    from rlstreams.workers.weights.link.target import Row

_SHOWN = 3  # differences named in a message


class LazyWeights(Mapping[str, "torch.Tensor"]):
    """Weights that are costly to load or gather; `facts` gives dtypes and shapes at no cost."""

    facts: Mapping[str, torch.Tensor]

    def sums(self) -> Mapping[str, torch.Tensor]:
        """Sums for `link/weight_hash.py`, of tensors whose sums cost less than the tensors."""
        return {}


def _facts(weights: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
    return weights.facts if isinstance(weights, LazyWeights) else weights


def layout_of(weights: Mapping[str, torch.Tensor]) -> str:
    """JSON `[[name, dtype, shape], ...]` in name order, which is the sending order."""
    from rlstreams.workers.weights.link.target import rows_of

    rows = rows_of(dict(sorted(_facts(weights).items())))
    return json.dumps(rows, separators=(",", ":"))


def parse_rows(layout: str) -> list[Row]:
    """Name, dtype and shape of each tensor, in any order; raises ValueError or TypeError."""
    return [(str(n), str(dtype), tuple(map(int, s))) for n, dtype, s in json.loads(layout)]


def parse_layout(layout: str) -> list[Row]:
    """Name, dtype and shape of each tensor, in sending order.

    Raises:
        WeightError: no layout, or a name is repeated or not in order.
    """
    try:
        rows = parse_rows(layout)
    except (ValueError, TypeError) as err:
        raise WeightError(f"layout is not [[name, dtype, shape], ...]: {err}") from err
    names = [name for name, _, _ in rows]
    if names != sorted(set(names)):
        raise WeightError("layout must name each tensor once and in name order")
    return rows


def layout_difference(*, expected: str, found: str) -> str:
    """Differences of two layouts, in words; empty if there are none."""
    if expected == found:
        return ""
    ours, theirs = (
        {name: (dtype, shape) for name, dtype, shape in parse_layout(layout)}
        for layout in (expected, found)
    )
    lines = [f"{name} is missing" for name in ours if name not in theirs]
    lines += [f"{name} is unexpected" for name in theirs if name not in ours]
    lines += [
        f"{name} should be {ours[name][0]} {list(ours[name][1])}, "
        f"is {theirs[name][0]} {list(theirs[name][1])}"
        for name in ours
        if name in theirs and ours[name] != theirs[name]
    ]
    more = f" and {len(lines) - _SHOWN} more" if len(lines) > _SHOWN else ""
    return "; ".join(lines[:_SHOWN]) + more


def weight_hash(weights: Mapping[str, torch.Tensor]) -> str:
    """The hash of a version, as `rlstreams/workers/weights/link/weight_hash.py` defines it."""
    from rlstreams.workers.weights.link.weight_hash import hash_of_sums, sums_of

    known = weights.sums() if isinstance(weights, LazyWeights) else {}
    sums = {n: known[n] if n in known else sums_of(weights[n]) for n in sorted(weights)}
    return hash_of_sums(_facts(weights), sums)


def size_bytes(weights: Mapping[str, torch.Tensor]) -> int:
    """Bytes of all tensors."""
    return sum(tensor.numel() * tensor.element_size() for tensor in _facts(weights).values())


def manifest_of(
    policy_version: int, weights: Mapping[str, torch.Tensor], known_hash: str | None
) -> WeightManifest:
    """The manifest of these weights; their hash is computed where it is not known."""
    return WeightManifest(
        policy_version=policy_version,
        weight_hash=known_hash or weight_hash(weights),
        num_bytes=size_bytes(weights),
        layout=layout_of(weights),
    )
