"""From a bus into a recording: a stretch of the log, or a live run as it goes.

The ends of the stretch are asked for downstream topics first, so that what a recorded step used was
written before its own end was known: it is in the recording too.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from rlstreams.schemas import DecodeError
from rlstreams.schemas.avro import fingerprint_of_foreign
from rlstreams.schemas.binary import HEADER_BYTES, MARKER
from rlstreams.schemas.events import StepCompleted, TrainerHeartbeat, TrainerStarted
from rlstreams.streams.log.bus import Bus, Closing
from rlstreams.streams.log.codec import decoded
from rlstreams.streams.log.errors import DeadlineError, StreamsError
from rlstreams.streams.log.record import Partition, RawRecord
from rlstreams.streams.log.topics import (
    CONTROL,
    DEAD_LETTERS,
    POLICY_PULLS,
    POLICY_VERSIONS,
    PROMPTS,
    SCHEMAS,
    SCORED,
    STEPS,
    TRAJECTORIES,
    WORKER_EVENTS,
)
from rlstreams.streams.recording.envelope import Described
from rlstreams.streams.recording.facts import facts_of
from rlstreams.streams.recording.selection import Range, Selection
from rlstreams.streams.recording.writer import RecordingWriter

# Downstream first; the schemas before all, for they explain the rest.
ORDER = (
    SCHEMAS,
    STEPS,
    DEAD_LETTERS,
    POLICY_VERSIONS,
    SCORED,
    TRAJECTORIES,
    PROMPTS,
    POLICY_PULLS,
    CONTROL,
    WORKER_EVENTS,
)
DONE = "done"
_POLL_BYTES = 16_000_000  # of one poll, about
_MAX_POLL = 1000
_POLL_S = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """For whoever watches."""

    num_records: int  # written by this process
    num_bytes: int  # read by it
    behind: int  # offsets up to the end of the stretch


class Recorder(Closing):
    """Reads topics of a run from where the recording stands.

    Args:
        bus: of the run.
        writer: of the recording; a resumed one goes on at its positions.
        selection: what is written; positions move on over the rest.
        commit_s: what a kill may cost, seconds.
        deadline_s: longest wait for the next record below a known end.
        on_progress: called after each commit.
    """

    def __init__(
        self,
        bus: Bus,
        writer: RecordingWriter,
        selection: Selection,
        *,
        commit_s: float = 1.0,
        deadline_s: float = 60.0,
        on_progress: Callable[[Progress], None] = lambda _: None,
    ) -> None:
        self._bus = bus
        self._writer = writer
        self._selection = selection
        self._commit_s = commit_s
        self._deadline_s = deadline_s
        self._on_progress = on_progress
        self._first = self._offsets(bus.beginnings)
        begun = {p: span.next for p, span in writer.spans.items() if p in self._first}
        self._reader = bus.reader(self._first | begun)
        self._ends: dict[Partition, int] = {}
        # Delivered and not taken: beyond the stretch, or a schema could not be asked for.
        self._ahead: list[RawRecord] = []
        self._next_commit_s = time.monotonic() + commit_s
        self._num_bytes = 0
        self._num_poll = 1
        self.trainer_state = ""  # what the newest epoch's trainer said last
        self._epoch = 0

    def up_to_now(self) -> None:
        """Record what the topics hold at this moment, and commit.

        Raises:
            DeadlineError: the broker stopped delivering; names where.
            OffsetGoneError: retention removed what a resumed recording would go on with.
        """
        self._ends = self._offsets(self._bus.ends)
        waiting, self._ahead = self._ahead, []
        self._take(waiting, self._ends)
        deadline_s = time.monotonic() + self._deadline_s
        while behind := self._behind():
            if self.step(_POLL_S, self._ends) or self._behind() != behind:
                deadline_s = time.monotonic() + self._deadline_s
            elif time.monotonic() > deadline_s:
                where = ", ".join(f"{p} at {at}" for p, at in sorted(self._positions().items()))
                raise DeadlineError(
                    f"recording: nothing delivered for {self._deadline_s:g} s; {where}"
                )
        self.commit()

    def step(self, timeout_s: float, ends: Mapping[Partition, int] | None = None) -> int:
        """Record what is there, or up to `ends`; the number of records that were read."""
        raws = self._reader.poll(self._num_poll, timeout_s)
        if raws:
            largest = max(len(raw.value) for raw in raws)
            fitting = max(1, _POLL_BYTES // (largest + 1))
            self._num_poll = min(_MAX_POLL, 2 * self._num_poll, fitting)
        self._take(raws, ends)
        if time.monotonic() >= self._next_commit_s:
            self.commit()
        return len(raws)

    def unasked(self) -> Mapping[str, int]:
        """Take what was delivered and waits for a schema, as bytes where nobody has it; commit.

        For a run whose broker is gone for good. What is kept as bytes is there whatever it may be
        about: nobody knows whether it was meant.

        Returns:
            how many records those are, by fingerprint (hexadecimal).
        """
        counts: Counter[str] = Counter()
        waiting: Sequence[RawRecord] = self._ahead
        self._ahead = []
        while waiting:
            self._take_unasked(waiting, counts)
            waiting = ()
            with suppress(StreamsError):  # what the client had is all there is
                waiting = self._reader.poll(self._num_poll, _POLL_S)
        self.commit()
        return counts

    def _take_unasked(self, raws: Sequence[RawRecord], counts: Counter[str]) -> None:
        anything = replace(
            self._selection, steps=None, versions=None, rows=None, groups=None, samples=None
        )
        for raw in raws:
            self._learn(raw)
        for raw in raws:
            described = self._writer.describe(raw)
            print_ = _print_of(raw)
            if described.event is not None or print_ is None:
                self._write(raw, described)
            elif anything.wants(raw, None, facts_of(None)):
                counts[print_.hex()] += 1
                self._num_bytes += len(raw.value)
                self._writer.append(raw, described)

    def commit(self) -> None:
        """Make what was taken count."""
        self._next_commit_s = time.monotonic() + self._commit_s
        self._writer.commit(self._positions(), self._first)
        written = self._writer.num_records
        behind = self._behind() if self._ends else 0
        self._on_progress(Progress(num_records=written, num_bytes=self._num_bytes, behind=behind))

    def close(self) -> None:
        """Release the reader; idempotent."""
        self._reader.close()

    def _take(self, raws: Sequence[RawRecord], ends: Mapping[Partition, int] | None) -> None:
        for index, raw in enumerate(raws):
            if ends is not None and raw.position.offset >= ends[raw.partition]:
                self._ahead.append(raw)
                continue
            try:
                described = self._described(raw)
            except StreamsError:
                self._ahead += raws[index:]
                raise
            self._write(raw, described)

    def _write(self, raw: RawRecord, described: Described) -> None:
        """Note what it says, and append it if it is meant."""
        self._num_bytes += len(raw.value)
        event = described.event
        if isinstance(event, TrainerStarted) and event.epoch > self._epoch:
            self._epoch, self.trainer_state = event.epoch, ""
        elif isinstance(event, TrainerHeartbeat) and event.epoch == self._epoch:
            self.trainer_state = event.state
        self._learn(raw)
        if self._selection.wants(raw, event, facts_of(event)):
            self._writer.append(raw, described)

    def _learn(self, raw: RawRecord) -> None:
        """A schema that is recorded itself needs not be asked for."""
        if raw.position.topic == SCHEMAS.name:
            text = bytes(raw.value).decode("utf-8", "replace")
            if fingerprint_of_foreign(text) is not None:
                self._writer.learn(text)

    def _described(self, raw: RawRecord) -> Described:
        """Also under a schema of another release that was not read yet, or by a predecessor."""
        described = self._writer.describe(raw)
        print_ = _print_of(raw)
        if described.event is not None or print_ is None:
            return described
        text = self._bus.schemas().get(print_)
        if text is None:
            return described
        self._writer.learn(text)
        return self._writer.describe(raw)

    def _positions(self) -> dict[Partition, int]:
        """Next offsets to read: what was delivered ahead of the stretch does not count."""
        positions = dict(self._reader.positions())
        for raw in self._ahead:
            positions[raw.partition] = min(positions[raw.partition], raw.position.offset)
        return positions

    def _behind(self) -> int:
        positions = self._positions()
        return sum(max(0, end - positions.get(p, 0)) for p, end in self._ends.items())

    def _offsets(self, ask: Callable[[str], Mapping[Partition, int]]) -> dict[Partition, int]:
        found: dict[Partition, int] = {}
        for topic in ORDER:
            if not self._selection.topics or topic.name in self._selection.topics:
                found |= ask(topic.name)
        return {p: at for p, at in found.items() if self._selection.wants_partition(p)}


def _print_of(raw: RawRecord) -> bytes | None:
    """The fingerprint that a record names; None: it is framed otherwise."""
    if raw.value[: len(MARKER)] != MARKER or len(raw.value) < HEADER_BYTES:
        return None
    return bytes(raw.value[len(MARKER) : HEADER_BYTES])


def groups_of_steps(bus: Bus, steps: Range, deadline_s: float = 60.0) -> frozenset[str]:
    """The groups that these steps trained on: one pass over `steps`.

    Raises:
        DeadlineError: the broker stopped delivering.
    """
    ends = bus.ends(STEPS.name)
    groups: set[str] = set()
    with bus.reader(bus.beginnings(STEPS.name)) as reader:
        until_s = time.monotonic() + deadline_s
        while any(reader.positions().get(p, 0) < end for p, end in ends.items()):
            raws = reader.poll(_MAX_POLL, _POLL_S)
            if raws:
                until_s = time.monotonic() + deadline_s
            elif time.monotonic() > until_s:
                raise DeadlineError(f"{STEPS.name}: nothing delivered for {deadline_s:g} s")
            for raw in raws:
                try:
                    event = decoded(raw, bus.schemas()).event
                except DecodeError:
                    continue  # recorded as it is; it names no groups
                if isinstance(event, StepCompleted) and event.step in steps:
                    groups.update(ref.group_id for ref in event.samples)
    return frozenset(groups)
