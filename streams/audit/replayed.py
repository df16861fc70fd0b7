"""Headers of a replay: what a log says of the replay that wrote it (decision 0015).

Events name positions of the log that they were recorded from. Each replayed record says in a header
where it lay there, so an audit can take every record at that place, and positions hold again.
"""

from __future__ import annotations

import re

from rlstreams.streams.log.record import (
    REPLAY_HEADER,
    REPLAY_SCOPE_HEADER,
    Partition,
    Position,
    RawRecord,
)

_ORIGIN = re.compile(
    rb"(?P<run>.+)/(?P<topic>[a-z-]+)\[(?P<partition>\d{1,9})\]@(?P<offset>\d{1,18})"
)


class Replay:
    """Notes what the records of a run's topics say; one that is no replay says nothing."""

    def __init__(self) -> None:
        self.run = ""  # that was recorded; empty: this is no replay
        self.is_part = False  # chosen records only, or into one role alone
        # A trainer that ran here itself names positions of this log.
        self.has_own_steps = False
        self.first: dict[Partition, int] = {}  # lowest recorded offset that was replayed

    @property
    def is_by_origin(self) -> bool:
        """Whether positions in events are those of the recorded log."""
        return bool(self.run) and not self.has_own_steps

    def take(self, raw: RawRecord) -> Position | None:
        """Note a record; where it lay in the recorded log, None if it is this log's own."""
        text = raw.headers.get(REPLAY_HEADER)
        found = None if text is None else _ORIGIN.fullmatch(bytes(text))
        if found is None or found["topic"].decode() != raw.position.topic:
            return None
        origin = Position(raw.position.topic, int(found["partition"]), int(found["offset"]))
        self.run = self.run or found["run"].decode("utf-8", "replace")
        self.is_part = self.is_part or REPLAY_SCOPE_HEADER in raw.headers
        partition = Partition(origin.topic, origin.partition)
        self.first[partition] = min(origin.offset, self.first.get(partition, origin.offset))
        return origin
