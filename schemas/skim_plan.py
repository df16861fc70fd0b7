"""What a skimmer does, field by field: made once from an event's fields and the wanted paths.

A plan is a function that moves a walk past a record. Neighbours of fixed length that nobody wants
are one step; wanted values are put into the columns of the walk at hand.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from rlstreams.schemas.shapes import fields_of, shape_of
from rlstreams.schemas.walk import Numbers, Some, Walk

_FIXED = {"double": 8, "boolean": 1}  # bytes
_Wanted = dict[str, "_Wanted"]  # by field; an empty one is a leaf
# Values at the positions, and where each ends.
Read = Callable[[Walk, Numbers], tuple[Numbers, Numbers]]


class Columns:
    """What a walk has found: for each path arrays in rounds; all but items have a single round."""

    def __init__(self, plan: Plan, walk: Walk) -> None:
        self.walk = walk
        self.numbers: dict[str, list[Numbers]] = {path: [] for path in plan.numbers}
        # Where each begins, where each ends.
        self.texts: dict[str, list[tuple[Numbers, Numbers]]] = {path: [] for path in plan.texts}
        # By path of an array: the record of each item.
        self.owners: dict[str, list[Numbers]] = {path: [] for path in plan.arrays}


# Moves the positions `at` of `owners` (record numbers) past something.
Step = Callable[[Columns, Numbers, Numbers], Numbers]


class Plan:
    """Steps past a record of `cls`, noting `paths`.

    Raises:
        TypeError: a path that the event does not have, or of a shape that cannot be skimmed.
    """

    def __init__(self, cls: type, paths: Sequence[str]) -> None:
        self.numbers: list[str] = []
        self.texts: list[str] = []
        self.arrays: list[str] = []
        tree: _Wanted = {}
        for path in paths:
            branch = tree
            for name in path.split("."):
                branch = branch.setdefault(name, {})
        self._step = _in_turn(self._record(cls, tree, "", is_item=False))

    def walk(self, walk: Walk, start: int) -> tuple[Columns, Numbers]:
        """The columns of all records of `walk`, and where each of them ends.

        Args:
            start: of the event in each record, in bytes.
        """
        columns = Columns(self, walk)
        at = walk.starts + start
        return columns, self._step(columns, at, np.arange(len(at)))

    def _record(
        self, cls: type, wanted: _Wanted, prefix: str, *, is_item: bool
    ) -> list[Step | int]:
        if unknown := wanted.keys() - {name for name, _ in fields_of(cls)}:
            raise TypeError(f"{cls.__name__} has no field {', '.join(sorted(unknown))}")
        steps: list[Step | int] = []
        for name, kind in fields_of(cls):
            shape, inner = shape_of(kind)
            path = prefix + name
            if shape == "record":
                steps += self._record(inner, wanted.get(name, {}), f"{path}.", is_item=is_item)
            elif name not in wanted:
                steps.append(_past(shape, inner))
            elif shape == "array" and wanted[name] and not is_item:
                steps.append(self._items(inner, wanted[name], path))
            else:
                steps.append(self._leaf(shape, inner, path))
        return steps

    def _items(self, cls: type, wanted: _Wanted, path: str) -> Step:
        """An array of records of which fields are wanted."""
        self.arrays.append(path)
        item = _in_turn(self._record(cls, wanted, f"{path}.", is_item=True))

        def step(columns: Columns, at: Numbers, owners: Numbers) -> Numbers:
            def pass_item(at: Numbers, some: Some, _number: int) -> Numbers:
                columns.owners[path].append(owners[some])
                return item(columns, at, owners[some])

            return columns.walk.blocks(at, pass_item)

        return step

    def _leaf(self, shape: str, inner: Any, path: str) -> Step:  # noqa: ANN401
        """Past a wanted field, whose values become a round of its column."""
        if shape == "string":
            self.texts.append(path)
            return _text(path)
        read = _first if shape == "array" and inner is int else _NUMBERS.get(shape)
        if read is None:
            raise TypeError(f"{path}: a field of shape {shape} cannot be skimmed")
        self.numbers.append(path)
        return _number(path, read)


def _in_turn(steps: Sequence[Step | int]) -> Step:
    """One step of many; numbers are bytes to step over."""
    merged: list[Step | int] = []
    for step in steps:
        if isinstance(step, int) and merged and isinstance(merged[-1], int):
            merged[-1] += step
        else:
            merged.append(step)
    made = [_over(step) if isinstance(step, int) else step for step in merged]

    def walk_on(columns: Columns, at: Numbers, owners: Numbers) -> Numbers:
        for step in made:
            at = step(columns, at, owners)
        return at

    return walk_on


def _over(num_bytes: int) -> Step:
    return lambda _columns, at, _owners: at + num_bytes


def _past(shape: str, inner: Any) -> Step | int:  # noqa: ANN401
    """Past a field that nobody wants."""
    if shape in _FIXED:
        return _FIXED[shape]
    if shape == "long":
        return lambda columns, at, _owners: columns.walk.past_long(at)
    if shape in ("string", "bytes"):
        return lambda columns, at, _owners: columns.walk.past_sized(at)
    if shape == "record":
        return _in_turn([_past(*shape_of(kind)) for _, kind in fields_of(inner)])
    value = _past(*shape_of(inner))
    if shape == "map":
        key = _past("string", str)
        return _blocks(_in_turn([key, value]))
    item = _over(value) if isinstance(value, int) else value
    return _optional(item) if shape == "optional" else _blocks(item)


def _optional(value: Step) -> Step:
    def step(columns: Columns, at: Numbers, owners: Numbers) -> Numbers:
        return columns.walk.optional(at, lambda at, some: value(columns, at, owners[some]))

    return step


def _blocks(item: Step) -> Step:
    def step(columns: Columns, at: Numbers, owners: Numbers) -> Numbers:
        return columns.walk.blocks(at, lambda at, some, _n: item(columns, at, owners[some]))

    return step


def _text(path: str) -> Step:
    def step(columns: Columns, at: Numbers, _owners: Numbers) -> Numbers:
        begin, end = columns.walk.sized(at)
        columns.texts[path].append((begin, end))
        return end.copy()  # positions are written to

    return step


def _number(path: str, read: Read) -> Step:
    def step(columns: Columns, at: Numbers, _owners: Numbers) -> Numbers:
        found, at = read(columns.walk, at)
        columns.numbers[path].append(found)
        return at

    return step


def _first(walk: Walk, at: Numbers) -> tuple[Numbers, Numbers]:
    """The first of an array of longs, 0 where it is empty."""
    first = np.zeros(len(at), np.int64)

    def pass_item(at: Numbers, some: Some, number: int) -> Numbers:
        value, at = walk.long(at)
        if not number:
            first[some] = value
        return at

    return first, walk.blocks(at, pass_item)


_NUMBERS: dict[str, Read] = {
    "long": Walk.long,
    "boolean": lambda walk, at: (walk.byte(at).astype(np.int64), at + 1),
}
