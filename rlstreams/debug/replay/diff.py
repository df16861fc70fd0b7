"""`rlstreams diff`: what two accounts of a run say differently, record by record.

Records are paired by what they are about (a sample, a step, a version), never by where they lie.
Of several records of one sample the first counts, as everywhere. Memory is constant: the second
account is looked up through its index.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from rlstreams.debug.replay.fields import Difference, differing
from rlstreams.schemas.events import Event
from rlstreams.streams.recording import Entry, Recording

# How each kind of event is paired: by these columns of the index. Other kinds are facts about one
# run's processes (heartbeats, reports, claims), which no other run shares.
PAIRED: dict[str, tuple[str, ...]] = {
    "Prompt": ("group_id", "sample"),
    "Trajectory": ("group_id", "sample"),
    "ScoredTrajectory": ("group_id", "sample"),
    "StepCompleted": ("step",),
    "PolicyPublished": ("version",),
    "DeadLetter": ("group_id", "sample"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A record of each side that are about the same, and what differs."""

    event: str
    about: str  # `17/3`, `step 4`
    one: Entry
    other: Entry
    differences: tuple[Difference, ...]


@dataclass(slots=True, kw_only=True)
class Summary:
    """All pairs of one kind of event."""

    event: str
    num_equal: int = 0
    num_different: int = 0
    missing: int = 0  # only in the first
    extra: int = 0  # only in the second
    by_field: Counter[str] = field(default_factory=Counter)  # records in which it differs
    gaps: dict[str, float] = field(default_factory=dict)  # largest distance
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


def diff(
    one: Recording,
    other: Recording,
    *,
    events: Collection[str] = (),
    tolerance: float = 0.0,
    everything: bool = False,
) -> list[Summary]:
    """Compare what both have.

    Args:
        one: the account to hold on to.
        other: what is compared with it.
        events: kinds to compare; none named: those that `other` holds.
        tolerance: numbers that are at most this far apart are equal.
        everything: also who wrote a record, when, and where things lie.
    """
    here = {file.kind.event for file in other.files}
    names = [name for name in PAIRED if (name in events if events else name in here)]
    return [_compare(one, other, name, tolerance, everything) for name in names]


def _compare(
    one: Recording, other: Recording, name: str, tolerance: float, everything: bool
) -> Summary:
    summary = Summary(event=name)
    for entry in _firsts(one, name):
        twin = _twin(other, name, entry)
        if twin is None:
            summary.missing += 1
            continue
        left, right = _event(one, entry), _event(other, twin)
        found = differing(left, right, tolerance=tolerance, everything=everything)
        summary.add(
            Pair(
                event=name,
                about=about(name, entry),
                one=entry,
                other=twin,
                differences=tuple(found),
            )
        )
    summary.extra = sum(_twin(one, name, entry) is None for entry in _firsts(other, name))
    return summary


def _firsts(recording: Recording, name: str) -> Iterator[Entry]:
    """The records that count: of each sample the first."""
    keys = ", ".join(f"r.{column}" for column in PAIRED[name])
    last: tuple[object, ...] | None = None
    where = f'f.event = ? ORDER BY {keys}, r.timestamp_ms, f.partition, r."offset"'
    for entry in recording.index.entries(where, [name]):
        key = _key(name, entry)
        if key != last:
            yield entry
        last = key


def _twin(recording: Recording, name: str, entry: Entry) -> Entry | None:
    keys = " AND ".join(f"r.{column} = ?" for column in PAIRED[name])
    where = f'f.event = ? AND {keys} ORDER BY r.timestamp_ms, f.partition, r."offset" LIMIT 1'
    return next(recording.index.entries(where, [name, *_key(name, entry)]), None)


def _key(name: str, entry: Entry) -> tuple[object, ...]:
    return tuple(getattr(entry.facts, column) for column in PAIRED[name])


def about(name: str, entry: Entry) -> str:
    """What a record is about, for people."""
    if PAIRED[name] == ("group_id", "sample"):
        return f"sample {entry.facts.group_id}/{entry.facts.sample}"
    (column,) = PAIRED[name]
    return f"{column} {getattr(entry.facts, column)}"


def _event(recording: Recording, entry: Entry) -> Event:
    return recording.decoded(recording.read(entry)).event


def lines(summaries: Collection[Summary]) -> list[str]:
    """For the terminal: counts, fields, and the first difference in its context."""
    if not summaries:
        return ["nothing to compare: the second holds no record of a kind that can be paired"]
    found = [f"{'':<17} {'equal':>9} {'different':>9} {'missing':>9} {'extra':>9}"]
    for summary in summaries:
        found.append(
            f"{summary.event:<17} {summary.num_equal:>9,} {summary.num_different:>9,} "
            f"{summary.missing:>9,} {summary.extra:>9,}"
        )
        for name, count in summary.by_field.most_common():
            gap = summary.gaps.get(name, 0.0)
            far = f", at most {gap:.3g} apart" if gap else ""
            found.append(f"  {name}: in {count:,}{far}")
    for summary in summaries:
        if summary.first is not None:
            found += ["", *_pair(summary.first)]
    return found


def _pair(pair: Pair) -> list[str]:
    first = pair.differences[0]
    more = len(pair.differences) - 1
    found = [
        f"first different {pair.event}: {pair.about}",
        f"  {pair.one.position}  and  {pair.other.position}",
        f"  {first.path}: {first.one}  and  {first.other}",
    ]
    if first.context:
        found.append(f"    {first.context}")
    return [*found, f"  and {more} more fields"] if more else found
