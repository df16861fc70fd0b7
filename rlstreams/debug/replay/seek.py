"""Going to another moment while a recording is played, earlier or later.

A log only grows: going back writes the records from there on once more, behind those that were
written. Their ids are the same, so whoever keeps the first record of a sample passes over them.
"""

from __future__ import annotations

from collections.abc import Iterator

from rlstreams.debug.replay.filters import chosen, moment, time_text
from rlstreams.schemas.events import StepCompleted, TrainerStarted
from rlstreams.streams.log.record import RawRecord
from rlstreams.streams.log.topics import SCHEMAS
from rlstreams.streams.recording import NotRecordedError, Recording
from rlstreams.streams.recording.selection import Selection


class Seeker:
    """Moments of one recording, and the records that follow them.

    Args:
        recording: that is played.
        selection: what of it is played; a moment outside of its times is refused.
    """

    def __init__(self, recording: Recording, selection: Selection) -> None:
        self._recording = recording
        self._selection = selection

    def to(self, text: str, now_ms: int) -> int:
        """The recorded time, milliseconds, that `text` means.

        Args:
            text: as for `--from`, or `-10` and `+10`: seconds from where it is now.
            now_ms: recorded time of the last record; 0: none was played.

        Raises:
            NotRecordedError: outside of what is played; says from where to where that goes.
            ConfigError: no moment.
        """
        first, last = self._span()
        if text[:1] in ("+", "-") and text[1:].removesuffix("s").replace(".", "", 1).isdecimal():
            seconds = float(text.removesuffix("s"))
            return min(last, max(first, (now_ms or first) + round(seconds * 1000)))
        found = moment(self._recording, text)
        if not first <= found <= last:
            raise NotRecordedError(
                f"{text} ({time_text(found)}) is outside of what is played, "
                f"{time_text(first)} to {time_text(last)}"
            )
        return found

    def step(self, change: int, now_ms: int) -> int:
        """Where the step begins that is `change` steps from the one under way.

        Raises:
            NotRecordedError: the recording holds no such step; says which it holds.
        """
        return self.to(f"step:{max(0, self._step_at(now_ms) + change)}", now_ms)

    def records(self, now_ms: int, to_ms: int) -> Iterator[RawRecord]:
        """What is to be played from `to_ms` on.

        On a way forward it begins with the schemas and claims that are leapt over: what follows
        cannot be understood without them.
        """
        leapt = [
            *self._recording.records([SCHEMAS.name]),
            *(record.raw for record in self._recording.events(TrainerStarted)),
        ]
        for raw in leapt:
            if now_ms < raw.timestamp_ms < to_ms and self._selection.wants_partition(raw.partition):
                yield raw
        yield from chosen(self._recording, self._selection, to_ms)

    def _step_at(self, now_ms: int) -> int:
        """The number of the step that was under way."""
        steps = [*self._recording.events(StepCompleted)]
        later = [record.event.step for record in steps if record.raw.timestamp_ms > now_ms]
        return min(later) if later else 1 + max((record.event.step for record in steps), default=0)

    def _span(self) -> tuple[int, int]:
        span = self._recording.time_span
        if span is None:
            raise NotRecordedError(f"{self._recording.folder} holds no record")
        limits = self._selection.time_ms
        if limits is None:
            return span
        return round(max(span[0], limits.first)), round(min(span[1], limits.last))
