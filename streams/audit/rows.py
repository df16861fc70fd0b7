"""From records of the large topics to rows of a few numbers: all that an audit wants of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from schemas.binary import DecodeError
from schemas.events import Prompt, ScoredTrajectory, Trajectory
from schemas.skim import Skimmer
from streams.audit.replayed import Replay
from streams.audit.table import OFFSET_BITS, group_key, place_of
from streams.record import ID_HEADER, REPLAY_HEADER, RawRecord
from streams.topics import PROMPTS, SCORED, TRAJECTORIES

# What is skimmed of each, in the order of the schema:
# (group text, sample, group size, purpose)
PromptRow: TypeAlias = tuple[bytes, int, int, bytes]
# (group text, sample, group size, [(author, version, weight hash, load id)], worker, finished ms)
TrajectoryRow: TypeAlias = tuple[
    bytes, int, int, Sequence[tuple[bytes, int, bytes, bytes]], bytes, int
]
# (group text, sample, group size, [(author, tokens, version)])
ScoredRow: TypeAlias = tuple[bytes, int, int, Sequence[tuple[bytes, int, int]]]


def _below(path: str, names: Sequence[str]) -> Sequence[str]:
    return [f"{path}.{name}" for name in names]


_SAMPLE = ("group_id", "sample", "group_size")
_SEGMENT = ("author", "policy_version", "weight_hash", "load_id")
_SCORED_SEGMENT = ("author", "token_ids.shape", "policy_version")
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


@dataclass(slots=True)
class Rows:
    """Rows of one topic, in the order of its partitions, and where each record lies."""

    topic: str
    rows: list[Any] = field(default_factory=list)
    places: list[int] = field(default_factory=list)
    # Records that cannot be read: (group text, sample, place), as far as their headers tell.
    unreadable: list[tuple[bytes, int, int]] = field(default_factory=list)
    # Of a replay: what its headers say, and the place in the recorded log by the place here.
    replay: Replay | None = None
    origins: dict[int, int] = field(default_factory=dict)

    def by_origin(self) -> Rows:
        """The same with each record where it lay in the recorded log."""
        at = self.origins
        return Rows(
            self.topic,
            self.rows,
            [at.get(place, place) for place in self.places],
            [(group, sample, at.get(place, place)) for group, sample, place in self.unreadable],
        )


class Sieve:
    """Turns records of one of the three large topics into rows."""

    def __init__(self, topic: str) -> None:
        self._topic = topic
        self._skim = Skimmer(*_SKIMMERS[topic])

    def rows(self, raws: Sequence[RawRecord]) -> Rows:
        """A row for each record, or its header's word for it."""
        found = Rows(self._topic)
        skim, add, put = self._skim, found.rows.append, found.places.append
        for raw in raws:
            _, partition, offset = raw.position
            if REPLAY_HEADER in raw.headers:
                self._replayed(found, raw)
            try:
                add(skim(raw.value))
                put(partition << OFFSET_BITS | offset)  # `place_of`, for what a log does have
            except DecodeError:
                found.unreadable.append((*_from_header(raw), place_of(partition, offset)))
        return found

    def _replayed(self, found: Rows, raw: RawRecord) -> None:
        found.replay = found.replay or Replay()
        if (origin := found.replay.take(raw)) is not None:
            _, partition, offset = raw.position
            found.origins[place_of(partition, offset)] = place_of(origin.partition, origin.offset)


def _from_header(raw: RawRecord) -> tuple[bytes, int]:
    group, _, rest = raw.headers.get(ID_HEADER, b"").partition(b"/")
    sample = rest.partition(b"/")[0]
    known = group_key(group) is not None and sample.isdigit()
    return (group, int(sample)) if known else (b"", -1)
