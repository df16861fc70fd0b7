"""Records that are no event of ours, in topics that every reader reads by itself.

In a topic whose records are handled one by one, such a record becomes a dead letter with its
position. `steps`, `policy-versions`, `control` and the like have many readers and no position to
commit: there it changes nothing, and each reader counts it and names it in its log.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from schemas import DecodeError
from schemas.events import Event
from streams.codec import decoded
from streams.record import RawRecord, Record
from workers.log import Log


class ForeignRecords:
    """Passes events on and keeps count of what is none.

    Args:
        reader: who reads, for the log.
    """

    def __init__(self, reader: str) -> None:
        self.log = Log({"reader": reader})
        self.num = 0
        self.newest = ""  # position and what is wrong

    def readable(self, raws: Iterable[RawRecord]) -> Iterator[Record[Event]]:
        """The records that decode, in order."""
        for raw in raws:
            try:
                record = decoded(raw)
            except DecodeError as err:
                self.note(raw, str(err))
            else:
                yield record

    def note(self, raw: RawRecord, detail: str) -> None:
        """One that is not ours."""
        self.num += 1
        self.newest = f"{raw.position}: {detail}"
        self.log.warning("foreign_record", position=str(raw.position), detail=detail)
