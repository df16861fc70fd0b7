"""Two events of one kind, field by field. Pure.

What says who wrote a record, when, and where things lie in that run's log differs between any two
runs; it is left out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from rlstreams.schemas.events import Event, Tensor
from rlstreams.streams.views.pace import MEASURED

WHO = frozenset({"run", "model", "epoch", "instance", "worker", "load_id"})
WHERE = frozenset(
    {
        "partition",
        "offset",
        "positions",
        "prompt_partition",
        "prompt_offset",
        "trajectory_partition",
        "trajectory_offset",
        "endpoints",
        "versions_served",
        "window",
        "window_place",
        "window_size",
    }
)
_AROUND = 3  # elements shown on either side of the first one that differs


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One field that differs."""

    path: str  # `scores[0].proximal_logprobs`
    one: str
    other: str
    gap: float = 0.0  # largest distance, of numbers
    context: str = ""  # of an array: what stands around the first difference

    @property
    def field(self) -> str:
        """The path without indices, to count by."""
        return "".join(part.partition("[")[0] + "." for part in self.path.split(".")).rstrip(".")


def differing(one: Event, other: Event) -> list[Difference]:
    """Fields that differ, bit for bit, in the order of the schema."""
    return list(_walk("", one, other))


def _walk(path: str, one: object, other: object) -> Iterator[Difference]:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        yield from _arrays(path, one, other)
    elif dataclasses.is_dataclass(one) and type(one) is type(other):
        for field in dataclasses.fields(one):
            if not is_left_out(field.name):
                here = f"{path}.{field.name}" if path else field.name
                yield from _walk(here, getattr(one, field.name), getattr(other, field.name))
    elif isinstance(one, tuple) and isinstance(other, tuple):
        if len(one) != len(other):
            yield Difference(path=path, one=f"{len(one)} items", other=f"{len(other)} items")
        for number, (item, its) in enumerate(zip(one, other, strict=False)):
            yield from _walk(f"{path}[{number}]", item, its)
    elif isinstance(one, Mapping) and isinstance(other, Mapping):
        for key in sorted(one.keys() | other.keys()):
            if key not in MEASURED:
                yield from _walk(f"{path}.{key}", one.get(key), other.get(key))
    elif one != other and (one == one or other == other):  # noqa: PLR0124  (not both are NaN)
        yield Difference(path=path, one=_brief(one), other=_brief(other), gap=_gap(one, other))


def is_left_out(name: str) -> bool:
    """Whether a field says who, when or where."""
    return name in WHO or name in WHERE or name.endswith("at_ms")


def _gap(one: object, other: object) -> float:
    if isinstance(one, int | float) and isinstance(other, int | float):
        return abs(float(one) - float(other))
    return 0.0


def _arrays(path: str, one: Tensor, other: Tensor) -> Iterator[Difference]:
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        yield Difference(
            path=path,
            one=f"{one.dtype} {list(one.shape)}",
            other=f"{other.dtype} {list(other.shape)}",
        )
        return
    if one.codec == other.codec and bytes(one.data) == bytes(other.data):
        return
    left, right = one.numpy(), other.numpy()
    unequal = left != right
    if not unequal.any():
        return
    first = np.unravel_index(int(unequal.argmax()), unequal.shape)
    flat = int(np.ravel_multi_index(first, unequal.shape))
    gap = float(np.abs(left.astype(np.float64) - right.astype(np.float64)).max())
    begin, end = max(0, flat - _AROUND), flat + _AROUND + 1
    yield Difference(
        path=f"{path}{[int(i) for i in first]}",
        one=repr(left[first].item()),
        other=repr(right[first].item()),
        gap=gap,
        context=f"elements {begin} to {min(end, left.size) - 1} of {left.size}, "
        f"{int(unequal.sum())} differ:\n"
        f"      {_row(left.reshape(-1)[begin:end])}\n      {_row(right.reshape(-1)[begin:end])}",
    )


def _row(values: np.ndarray) -> str:
    return "  ".join(
        f"{value:>12.8g}" if values.dtype.kind == "f" else f"{value:>6}" for value in values
    )


def _brief(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:97]}..."
