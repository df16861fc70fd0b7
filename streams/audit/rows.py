"""From records of the large topics to columns of a few numbers: all that an audit wants of them.

Records come by the hundred, so what is known of them is arrays with an entry for each. Texts become
numbers where they are read: a group its key, weights as a trajectory names them an index.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import TypeAlias

import numpy as np

from rlstreams.schemas.binary import NO_TEXTS, SchemaTexts
from rlstreams.schemas.events import Prompt, ScoredTrajectory, Trajectory
from rlstreams.schemas.skim import Skim, Skimmer, Texts
from rlstreams.schemas.walk import Numbers
from rlstreams.streams.audit.replayed import Replay
from rlstreams.streams.audit.table import MAX_SAMPLES, NO_GROUP, OFFSET_BITS, group_key, place_of
from rlstreams.streams.log.group_ids import MAX_DIGITS
from rlstreams.streams.log.record import ID_HEADER, REPLAY_HEADER, Batch
from rlstreams.streams.log.topics import PROMPTS, SCORED, TRAJECTORIES

# Weights as trajectories name them: (worker, load id, version, hash).
Load: TypeAlias = tuple[bytes, bytes, int, bytes]

_SAMPLE = ("group_id", "sample", "group_size")
_SEGMENT = ("author", "policy_version", "weight_hash", "load_id")
_SCORED_SEGMENT = ("author", "token_ids.shape", "policy_version")


def _below(path: str, names: Sequence[str]) -> Sequence[str]:
    return [f"{path}.{name}" for name in names]


_SKIMMERS = {
    PROMPTS.name: (Prompt, (*_SAMPLE, "purpose")),
    TRAJECTORIES.name: (
        Trajectory,
        (*_SAMPLE, "worker", "finished_at_ms", *_below("segments", _SEGMENT)),
    ),
    SCORED.name: (
        ScoredTrajectory,
        (*_below("trajectory", _SAMPLE), *_below("trajectory.segments", _SCORED_SEGMENT)),
    ),
}


def no_numbers() -> Numbers:
    """An empty column."""
    return np.zeros(0, np.int64)


@dataclass(slots=True, kw_only=True)
class Segments:
    """Of the policy's segments, in the order of their records."""

    row: Numbers  # of the record that holds it
    index: Numbers  # among all segments of its trajectory
    version: Numbers
    tokens: Numbers = field(default_factory=no_numbers)  # scored trajectories alone
    load: Numbers = field(default_factory=no_numbers)  # trajectories alone: index into `loads`

    def of(self, rows: Numbers, num_rows: int) -> Segments:
        """Of scored records: those of some of the `num_rows`, which are counted anew."""
        number = np.full(num_rows, -1)
        number[rows] = np.arange(len(rows))
        row = number[self.row]
        has = row >= 0
        return Segments(
            row=row[has],
            index=self.index[has],
            version=self.version[has],
            tokens=self.tokens[has],
        )


@dataclass(slots=True, kw_only=True)
class Rows:
    """Records of one topic, in the order of its partitions: columns with an entry for each.

    What only one topic has is empty for the others.
    """

    topic: str
    place: Numbers  # where it lies
    group: Numbers  # key; NO_GROUP: an id that no group has
    sample: Numbers
    size: Numbers  # of its group, as it says
    names: Mapping[int, bytes] = field(default_factory=dict)  # by row: ids that no group has
    purposes: Mapping[int, bytes] = field(default_factory=dict)  # by row: prompts, evaluations
    finished_ms: Numbers = field(default_factory=no_numbers)  # trajectories
    segments: Segments | None = None  # trajectories and scored ones
    loads: Sequence[Load] = ()  # trajectories: what `segments.load` counts
    # Records that cannot be read: (group key, sample, place), as far as their headers tell.
    unreadable: Sequence[tuple[int, int, int]] = ()
    # Of a replay: what its headers say, and the place in the recorded log by the place here.
    replay: Replay | None = None
    origins: Mapping[int, int] = field(default_factory=dict)

    def by_origin(self) -> Rows:
        """The same with each record where it lay in the recorded log."""
        at = self.origins
        places = np.array([at.get(place, place) for place in self.place.tolist()], np.int64)
        unreadable = [(group, sample, at.get(p, p)) for group, sample, p in self.unreadable]
        return replace(self, place=places, unreadable=unreadable)


class Sieve:
    """Turns records of one of the three large topics into rows.

    Args:
        schemas: of the bus that they come from.
    """

    def __init__(self, topic: str, schemas: SchemaTexts = NO_TEXTS) -> None:
        self._topic = topic
        self._schemas = schemas
        self._skim = Skimmer(*_SKIMMERS[topic])
        self._prefix = "trajectory." if topic == SCORED.name else ""

    def rows(self, batches: Sequence[Batch]) -> Rows:
        """A row for each record, or its header's word for it."""
        found = self._skim([value for batch in batches for value in batch.values], self._schemas)
        places = _places(batches)
        headers = [own for batch in batches for own in batch.headers]
        numbers, texts, at = found.numbers, found.texts, self._prefix
        groups, names = _groups(texts[f"{at}group_id"])
        rows = Rows(
            topic=self._topic,
            place=places[found.records] if found.errors else places,
            group=groups,
            sample=numbers[f"{at}sample"],
            size=numbers[f"{at}group_size"],
            names=names,
            unreadable=[(*_told(headers[at]), int(places[at])) for at in found.errors],
        )
        if any(REPLAY_HEADER in own for own in headers):
            self._replayed(rows, batches)
        if self._topic == PROMPTS.name:
            rows.purposes = _purposes(groups, texts["purpose"])
        elif self._topic == TRAJECTORIES.name:
            rows.finished_ms = numbers["finished_at_ms"]
            rows.segments, rows.loads = _used(found)
        else:
            rows.segments = _scored(found)
        return rows

    def _replayed(self, rows: Rows, batches: Sequence[Batch]) -> None:
        rows.replay = Replay()
        origins: dict[int, int] = {}
        for raw in chain.from_iterable(batch.records() for batch in batches):
            if (origin := rows.replay.take(raw)) is not None:
                _, partition, offset = raw.position
                place = place_of(partition, offset)
                origins[place] = place_of(origin.partition, origin.offset)
        rows.origins = origins


def _groups(texts: Texts) -> tuple[Numbers, dict[int, bytes]]:
    """Keys, and by row the ids that are none."""
    keys = texts.naturals(MAX_DIGITS)
    names: dict[int, bytes] = {}
    others = np.flatnonzero(keys < 0)
    for row, text in zip(others.tolist(), texts.only(others).slices(), strict=True):
        key = group_key(text)
        keys[row] = NO_GROUP if key is None else key
        if key is None:
            names[row] = text
    return keys, names


def _purposes(groups: Numbers, texts: Texts) -> dict[int, bytes]:
    rows = np.flatnonzero((groups < 0) & (groups != NO_GROUP))
    return dict(zip(rows.tolist(), texts.only(rows).slices(), strict=True))


def _used(found: Skim) -> tuple[Segments, list[Load]]:
    """The policy's segments of trajectories, and which weights made them."""
    chosen, segments = _of_policy(found, "segments")
    columns = (
        found.texts["worker"].only(segments.row).slices(),
        found.texts["segments.load_id"].only(chosen).slices(),
        segments.version.tolist(),
        found.texts["segments.weight_hash"].only(chosen).slices(),
    )
    loads: dict[Load, int] = {}
    codes = [loads.setdefault(load, len(loads)) for load in zip(*columns, strict=True)]
    segments.load = np.array(codes, np.int64)
    return segments, list(loads)


def _scored(found: Skim) -> Segments:
    """The policy's segments of scored trajectories."""
    path = "trajectory.segments"
    chosen, segments = _of_policy(found, path)
    segments.tokens = found.numbers[f"{path}.token_ids.shape"][chosen]
    return segments


def _of_policy(found: Skim, path: str) -> tuple[Numbers, Segments]:
    """Which items of the segments' columns are the policy's, and what both topics say of them."""
    owners = found.owners[path]
    chosen = np.flatnonzero(found.texts[f"{path}.author"].are(b"policy"))
    row = owners[chosen]
    first = np.searchsorted(owners, row)  # where its record's segments begin
    version = found.numbers[f"{path}.policy_version"][chosen]
    return chosen, Segments(row=row, index=chosen - first, version=version)


def _places(batches: Sequence[Batch]) -> Numbers:
    parts = [
        np.array(offsets, np.int64) | partition.number << OFFSET_BITS
        for partition, offsets, _, _ in batches
    ]
    return np.concatenate(parts) if parts else no_numbers()


def _told(headers: Mapping[str, bytes]) -> tuple[int, int]:
    """Group key and sample, as far as headers say."""
    group, _, rest = (headers.get(ID_HEADER) or b"").partition(b"/")
    sample = rest.partition(b"/")[0]
    key = group_key(group)
    if key is None or not sample.isdigit():
        return NO_GROUP, -1
    return key, int(sample) if len(sample) <= MAX_DIGITS else MAX_SAMPLES
