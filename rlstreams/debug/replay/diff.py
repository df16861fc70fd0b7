"""`rlstreams record diff`: differences of two accounts of a run, record by record.

Records are paired by what they are about (a sample, a step, a version), never by where they lie.
Of several records of one sample the first counts, as everywhere. Memory is a position for each
record of the second account, which is looked up there. Writers, times and places in the log differ
between any two runs; these fields are left out.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from rlstreams.schemas.events import (
    DeadLetter,
    Event,
    PolicyPublished,
    Prompt,
    ScoredTrajectory,
    StepCompleted,
    Tensor,
    Trajectory,
)
from rlstreams.streams.log.record import Position
from rlstreams.streams.recording import Recording
from rlstreams.streams.recording.table import facts_of
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One field that differs."""

    path: str  # `scores[0].proximal_logprobs`
    one: str
    other: str
    gap: float = 0.0  # largest distance, of numbers
    more: str = ""  # of an array: the number of elements that differ

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
    yield Difference(
        path=f"{path}{[int(i) for i in first]}",
        one=repr(left[first].item()),
        other=repr(right[first].item()),
        gap=float(np.abs(left.astype(np.float64) - right.astype(np.float64)).max()),
        more=f"; {int(unequal.sum())} of {left.size} differ",
    )


def _brief(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:97]}..."


# Facts by which each kind of event is paired. Other kinds are about one run's processes
# (heartbeats, reports, claims), which no other run shares.
PAIRED: Mapping[type[Event], tuple[str, ...]] = {
    Prompt: ("group_id", "sample"),
    Trajectory: ("group_id", "sample"),
    ScoredTrajectory: ("group_id", "sample"),
    StepCompleted: ("step",),
    PolicyPublished: ("version",),
    DeadLetter: ("group_id", "sample"),
}
Key = tuple[object, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Two records about the same thing, one of each side, and their differences."""

    event: str
    about: str  # `17/3`, `step 4`
    one: Position
    other: Position
    differences: tuple[Difference, ...]


@dataclass(slots=True, kw_only=True)
class Summary:
    """All pairs of one kind of event."""

    event: str
    num_equal: int = 0
    num_different: int = 0
    missing: int = 0  # only in the first
    extra: int = 0  # only in the second
    by_field: Counter[str] = field(default_factory=Counter)  # records in which a field differs
    gaps: dict[str, float] = field(default_factory=dict)  # largest distance by field
    first: Pair | None = None

    @property
    def is_equal(self) -> bool:
        """Whether nothing differs and nothing is missing from the second."""
        return self.num_different == 0 and self.missing == 0

    def add(self, pair: Pair) -> None:
        """Count a pair."""
        if not pair.differences:
            self.num_equal += 1
            return
        self.num_different += 1
        self.first = self.first or pair
        for name in {difference.field for difference in pair.differences}:
            self.by_field[name] += 1
        for difference in pair.differences:
            known = self.gaps.get(difference.field, 0.0)
            self.gaps[difference.field] = max(known, difference.gap)


def diff(one: Recording, other: Recording) -> list[Summary]:
    """Compare the kinds of events that both have."""
    found = ((kind, _firsts(other, kind)) for kind in PAIRED)
    return [_compare(one, other, kind, twins) for kind, twins in found if twins]


def _compare(
    one: Recording, other: Recording, kind: type[Event], twins: dict[Key, Position]
) -> Summary:
    summary, firsts = Summary(event=kind.__name__), _firsts(one, kind)
    for key, position in firsts.items():
        twin = twins.get(key)
        if twin is None:
            summary.missing += 1
            continue
        left, right = one.decoded(one.at(position)).event, other.decoded(other.at(twin)).event
        words = "/".join(map(str, key))
        summary.add(
            Pair(
                event=kind.__name__,
                about=f"{'sample' if len(key) > 1 else PAIRED[kind][0]} {words}",
                one=position,
                other=twin,
                differences=tuple(differing(left, right)),
            )
        )
    summary.extra = len(twins.keys() - firsts.keys())
    return summary


def _firsts(recording: Recording, kind: type[Event]) -> dict[Key, Position]:
    """Return the position of the first record of each key: the record that counts."""
    found: dict[Key, Position] = {}
    for record in recording.events(kind):
        facts = facts_of(record.event)
        key = tuple(getattr(facts, column) for column in PAIRED[kind])
        found.setdefault(key, record.position)
    return found


def lines(summaries: Collection[Summary]) -> list[str]:
    """Return lines for the terminal: counts, fields, and the first difference of each kind."""
    if not summaries:
        return ["nothing to compare: the second holds no record of a kind that can be paired"]
    found = [f"{'':<17} {'equal':>9} {'different':>9} {'missing':>9} {'extra':>9}"]
    for summary in summaries:
        found.append(
            f"{summary.event:<17} {summary.num_equal:>9,} {summary.num_different:>9,} "
            f"{summary.missing:>9,} {summary.extra:>9,}"
        )
        found += field_lines(summary)
    return [*found, *(line for s in summaries if s.first for line in ("", *pair_lines(s.first)))]


def field_lines(summary: Summary) -> list[str]:
    """Return a line for each field that differs: in how many records, and how far."""
    return [
        f"  {name}: in {count:,}" + (f", at most {gap:.3g} apart" if gap else "")
        for name, count in summary.by_field.most_common()
        for gap in (summary.gaps.get(name, 0.0),)
    ]


def pair_lines(pair: Pair) -> list[str]:
    """Return lines on the first field in which two records differ."""
    first, more = pair.differences[0], len(pair.differences) - 1
    return [
        f"first different {pair.event}: {pair.about}",
        f"  {pair.one}  and  {pair.other}",
        f"  {first.path}: {first.one}  and  {first.other}{first.more}",
        *([f"  and {more} more fields"] if more else []),
    ]
