"""Records a bus: a stretch of the log, or a live run as it goes.

The ends of the stretch are asked for downstream topics first: the records that a recorded step used
were written before their own topic's end was asked for, so they are in the recording too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from rlstreams.schemas import DecodeError
from rlstreams.schemas.avro import fingerprint_of_foreign
from rlstreams.schemas.events import TrainerHeartbeat, TrainerStarted
from rlstreams.streams.log import topics as t
from rlstreams.streams.log.bus import Bus, Closing
from rlstreams.streams.log.codec import decoded
from rlstreams.streams.log.errors import StreamsError
from rlstreams.streams.log.read_to import read_to
from rlstreams.streams.log.record import Partition, RawRecord
from rlstreams.streams.recording.writer import RecordingWriter

# Downstream first; the schemas before all, for they explain the rest.
_FIRST = (t.SCHEMAS, t.STEPS, t.DEAD_LETTERS, t.POLICY_VERSIONS, t.SCORED, t.TRAJECTORIES)
ORDER = (*_FIRST, t.OUTCOMES, t.CALLS, t.PROMPTS, t.POLICY_PULLS, t.CONTROL, t.WORKER_EVENTS)
DONE = "done"
_BATCH = 100  # records of a poll; few enough for memory where each has megabytes
_ASK_EVERY_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordingProgress:
    """Progress of a recording."""

    num_records: int  # written by this process
    num_bytes: int  # read by it
    behind: int  # offsets up to the end of the stretch


class Recorder(Closing):
    """Reads topics of a run from the recording's positions on.

    Args:
        bus: the run's.
        writer: the recording's; a resumed one goes on at its positions.
        on_progress: called after each poll.
    """

    def __init__(
        self,
        bus: Bus,
        writer: RecordingWriter,
        *,
        on_progress: Callable[[RecordingProgress], None] = lambda _: None,
    ) -> None:
        self._bus = bus
        self._writer = writer
        self._on_progress = on_progress
        self._first = self._offsets(bus.beginnings)
        begun = {p: at for p, (_, at) in writer.spans.items() if p in self._first}
        self._reader = bus.reader(self._first | begun)
        self._ends: dict[Partition, int] = {}
        self._num_bytes = 0
        self._ask_at_s = 0.0  # earliest next request: the broker of a finished run may be gone
        self.trainer_state = ""  # in the newest epoch's last heartbeat
        self._epoch = 0

    def up_to_now(self) -> None:
        """Record the topics up to their present ends, and commit; nothing is read after it.

        Raises:
            DeadlineError: the broker stopped delivering; names the position.
            OffsetGoneError: retention removed records that a resumed recording would go on with.
        """
        self._ends = self._offsets(self._bus.ends)
        for raws in read_to(self._reader, self._ends, batch=_BATCH):
            self._record(raws)
        self.commit()

    def step(self, timeout_s: float) -> int:
        """Record available records; return the number that was read."""
        raws = self._reader.poll(_BATCH, timeout_s)
        self._record(raws)
        return len(raws)

    def _record(self, raws: Sequence[RawRecord]) -> None:
        for raw in raws:
            if raw.position.offset < self._ends.get(raw.partition, raw.position.offset + 1):
                self._take(raw)
        if self._writer.is_due:
            self.commit()
        written, read = self._writer.num_records, self._num_bytes
        self._on_progress(
            RecordingProgress(num_records=written, num_bytes=read, behind=self._behind())
        )

    def commit(self) -> None:
        """Give the records taken so far their file."""
        self._writer.commit(self._positions(), self._first)

    def close(self) -> None:
        """Release the reader; idempotent."""
        self._reader.close()

    def _take(self, raw: RawRecord) -> None:
        """Append a record; note its schema, claim or heartbeat."""
        self._num_bytes += len(raw.value)
        if raw.position.topic == t.SCHEMAS.name:
            text = bytes(raw.value).decode("utf-8", "replace")
            if fingerprint_of_foreign(text) is not None:
                self._writer.learn(text)
        event = None
        with suppress(DecodeError):  # a record that does not decode is recorded all the same
            event = decoded(raw, self).event
        if isinstance(event, TrainerStarted) and event.epoch > self._epoch:
            self._epoch, self.trainer_state = event.epoch, ""
        elif isinstance(event, TrainerHeartbeat) and event.epoch == self._epoch:
            self.trainer_state = event.state
        self._writer.append(raw, event)

    def get(self, print_: bytes, /) -> str | None:
        """Return a schema text that was recorded, or that the bus knows (port `SchemaTexts`)."""
        text = self._writer.schemas.get(print_)
        if text is None and time.monotonic() >= self._ask_at_s:
            try:
                text = self._bus.schemas().get(print_)
            except StreamsError:
                self._ask_at_s = time.monotonic() + _ASK_EVERY_S
            if text is not None:
                self._writer.learn(text)
        return text

    def _positions(self) -> dict[Partition, int]:
        """Return the next offsets to read; records behind the stretch do not count."""
        positions = self._reader.positions()
        return {p: min(at, self._ends.get(p, at)) for p, at in positions.items()}

    def _behind(self) -> int:
        positions = self._positions()
        return sum(max(0, end - positions.get(p, 0)) for p, end in self._ends.items())

    def _offsets(self, ask: Callable[[str], Mapping[Partition, int]]) -> dict[Partition, int]:
        begun_with = self._writer.manifest.topics
        names = [topic.name for topic in ORDER if topic.name in begun_with]
        return {p: at for name in names for p, at in ask(name).items()}
