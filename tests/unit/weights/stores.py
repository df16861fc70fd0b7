"""Stores of the tests: versions of several dtypes, written and read back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from rlstreams.workers.loop.log import get
from rlstreams.workers.weights.layout import manifest_of, weight_hash
from rlstreams.workers.weights.store.history import HeldVersion, WeightHistory
from rlstreams.workers.weights.store.place import Place, place_of
from rlstreams.workers.weights.store.writer import StoreWriter

Tensors = dict[str, torch.Tensor]
DEADLINE_S = 60.0


def weights(version: int) -> Tensors:
    """Several dtypes and shapes; some of it moves from version to version."""
    some = torch.Generator().manual_seed(1)
    big = torch.randn(64, 33, generator=some).bfloat16()
    big.view(torch.int16)[:: 7 + version % 3] += version
    return {
        "z": torch.arange(6.0).reshape(2, 3) * 1.01**version,
        "big": big,
        "scale": torch.tensor(float(version)),
        "buffer": torch.arange(5, dtype=torch.int64)[::2] - version,
        "mask": torch.arange(9) % 2 == version % 2,
        "nothing": torch.empty(0, 3),
    }


def hash_at(version: int) -> str:
    return weight_hash(weights(version))


@contextmanager
def storing(
    place: Place | Path, *, epoch: int = 1, run: str = "demo", **options: Any
) -> Iterator[StoreWriter]:
    """A trainer's store; what it took is written when the block ends."""
    place = place_of(str(place)) if isinstance(place, Path) else place
    options = {"anchor_every": 4, "keep": 0, "deadline_s": 60.0} | options
    writer = StoreWriter(place, run, get("trainer", "trainer-0", "i"), **options)
    writer.open(epoch)
    yield writer
    writer.finish(DEADLINE_S)
    writer.close()


def put(writer: StoreWriter, *versions: int, content: Callable[[int], Tensors] = weights) -> None:
    """One after the other, each once the one before is stored."""
    for version in versions:
        tensors = content(version)
        writer.take(manifest_of(version, tensors, None), tensors)
        writer.finish(DEADLINE_S)


def read(folder: Path, version: int, run: str = "demo", **options: Any) -> HeldVersion:
    history = WeightHistory(place_of(str(folder)), run)
    return history.weights_at(version, hash_at(version), **{"deadline_s": DEADLINE_S} | options)


def get_back(folder: Path, version: int, run: str = "demo", **options: Any) -> Tensors:
    return dict(read(folder, version, run, **options).tensors)


def same(one: Tensors, other: Tensors) -> bool:
    assert list(one) == sorted(other)
    return all(
        torch.equal(one[n], other[n]) and one[n].dtype == other[n].dtype for n in one
    )  # fmt: skip


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())
