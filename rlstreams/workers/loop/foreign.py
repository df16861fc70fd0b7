"""Records that are not our events, in topics that each reader reads without a group.

In a topic whose records are handled one by one, such a record becomes a dead letter, committed with
its offset. `steps`, `policy-versions`, `control` and the like have many readers and no offset to
commit: there it has no effect, and each reader counts it and names it in its log.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from rlstreams.schemas import DecodeError, SchemaTexts
from rlstreams.schemas.events import Event
from rlstreams.streams.log.codec import decoded
from rlstreams.streams.log.record import RawRecord, Record
from rlstreams.workers.loop.log import Log


class ForeignRecords:
    """Passes events on, and counts records that are none.

    Args:
        reader: name of the reader, for the log.
        schemas: of the bus that it reads from.
    """

    def __init__(self, reader: str, schemas: SchemaTexts) -> None:
        self.log = Log({"reader": reader})
        self._schemas = schemas
        self.num = 0
        self.newest = ""  # position and problem of the newest one

    def readable(self, raws: Iterable[RawRecord]) -> Iterator[Record[Event]]:
        """The records that decode, in order."""
        for raw in raws:
            try:
                record = decoded(raw, self._schemas)
            except DecodeError as err:
                self.note(raw, str(err))
            else:
                yield record

    def note(self, raw: RawRecord, detail: str) -> None:
        """Count and log a record that is not ours."""
        self.num += 1
        self.newest = f"{raw.position}: {detail}"
        self.log.warning("foreign_record", position=str(raw.position), detail=detail)
