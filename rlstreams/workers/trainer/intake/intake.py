"""Intake of the trainer: scored trajectories and dead letters, into the planner.

It reads with `assign` and seek, never with a group: the offsets to resume from are in `steps`. Dead
letters that exist at startup are read first, so that none is written twice.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping

from rlstreams.schemas.events import DeadLetter, PartitionPosition, ScoredTrajectory
from rlstreams.streams.log.bus import Bus
from rlstreams.streams.log.codec import decoded
from rlstreams.streams.log.record import Partition, Position, RawRecord
from rlstreams.streams.log.topics import DEAD_LETTERS, SCORED
from rlstreams.workers.config.run import START
from rlstreams.workers.loop.context import Context
from rlstreams.workers.loop.dead_letters import Reason, dead_letter, refusal
from rlstreams.workers.loop.foreign import ForeignRecords
from rlstreams.workers.loop.reporter import Reporter
from rlstreams.workers.model.routes import RouterShape
from rlstreams.workers.trainer.intake.admission import Admission
from rlstreams.workers.trainer.intake.fetch import POLL_BYTES, PollSize
from rlstreams.workers.trainer.intake.groups import DeadSample, SeenSample, origin_of
from rlstreams.workers.trainer.intake.payloads import Payload, Payloads
from rlstreams.workers.trainer.intake.validation import (
    check_reference,
    check_routing,
    check_versions,
    is_ours,
    validate,
)


class Intake:
    """Feeds `Admission` and `Payloads`; collects dead letters of samples that cannot be trained on.

    Args:
        max_tokens: of the longest sample that the model takes.
        start: positions recorded by a predecessor's last step.
        hashes: weight hash of every version that the ledger knows, kept up to date by its owner;
            None: samples are not checked against it.
        reporter: counts records in `dead-letters` that are no event.
        routers: of the model, where recorded routes are replayed.
    """

    def __init__(
        self,
        context: Context,
        bus: Bus,
        admission: Admission,
        payloads: Payloads,
        *,
        vocab_size: int,
        max_tokens: int,
        start: tuple[PartitionPosition, ...],
        hashes: Mapping[int, str] | None = None,
        reporter: Reporter | None = None,
        routers: RouterShape | None = None,
    ) -> None:
        self._context = context
        self._admission = admission
        self._payloads = payloads
        self._vocab_size, self._max_tokens = vocab_size, max_tokens
        self._hashes = hashes
        self._reporter = reporter
        self._routers = routers
        self._foreign = ForeignRecords(context.worker, bus.schemas())
        self._schemas = bus.schemas()
        offsets = _start_offsets(bus, start)
        # Scored records are held back until the old dead letters are read; empty from then on.
        self._history = bus.ends(DEAD_LETTERS.name)
        has_letters = any(offsets[p] < end for p, end in self._history.items())
        self._later = {p: at for p, at in offsets.items() if has_letters and p.topic == SCORED.name}
        self._old_ends = {**bus.ends(SCORED.name), **self._history}  # of records older than us
        # By origin, its dead letter's position; None: not written, or not read back yet.
        self._buried: dict[Position, Position | None] = {}
        self._bus = bus
        self._ends: Mapping[Partition, int] = {}  # of scored-trajectories, when last asked for
        self._has_asked = False  # within this poll
        self._reader = bus.reader({p: at for p, at in offsets.items() if p not in self._later})
        self._size = PollSize(min(POLL_BYTES, payloads.limit_bytes))
        self.letters: list[DeadLetter] = []
        self.num_samples = 0
        self._reference_hash = ""  # of the first score

    def poll(self, timeout_s: float) -> int:
        """Read available records; returns how many of them are older than this process.

        Most of those were trained on before: to read past them is progress that only this count
        shows.
        """
        now_s = time.monotonic()
        self._open()
        raws = self._reader.poll(self._size.num_records, timeout_s)
        self._size.saw(raws)
        self._has_asked = False
        for raw in raws:
            if raw.position.topic == SCORED.name:
                self._sample(raw, now_s)
            else:
                self._dead(raw, now_s)
        return sum(raw.position.offset < self._old_ends.get(raw.partition, 0) for raw in raws)

    def set_aside(self, payload: Payload, reason: Reason, detail: str) -> None:
        """Queue the dead letter of a sample that passed every check, and that no step can take.

        Not permanent: another answer to the same row may do.
        """
        letter = dead_letter(
            self._context,
            payload.raw,
            payload.scored.trajectory,
            reason=reason,
            detail=detail,
            permanent=False,
        )
        if payload.raw.position not in self._buried:
            self.letters.append(letter)
            self._buried[payload.raw.position] = None

    def positions(self) -> Mapping[Partition, int]:
        """Next offsets to read, by partition."""
        return {**self._reader.positions(), **self._later}

    def low_watermarks(self, closing: Iterable[str] = ()) -> dict[Partition, int]:
        """Per partition the lowest offset that a successor must read again.

        These include dead letters whose records it will meet again: else it would write them once
        more. Dead letters of other records are forgotten.

        Args:
            closing: groups that the event which carries the answer closes.
        """
        low = self._admission.low_watermarks(self.positions(), closing)
        self._buried = {
            origin: letter
            for origin, letter in self._buried.items()
            if origin.offset >= low.get(Partition(origin.topic, origin.partition), 0)
        }
        for letter in self._buried.values():
            if letter is not None:
                partition = Partition(letter.topic, letter.partition)
                low[partition] = min(letter.offset, low.get(partition, letter.offset))
        return low

    def close(self) -> None:
        """Release the reader."""
        self._reader.close()

    def _open(self) -> None:
        """Start to read samples once the old dead letters are read."""
        read = self._reader.positions()
        if self._later and all(read[p] >= end for p, end in self._history.items()):
            self._reader.seek({**read, **self._later})
            self._later = {}

    def _sample(self, raw: RawRecord, now_s: float) -> None:
        scored: ScoredTrajectory | None = None
        try:
            event = decoded(raw, self._schemas).event
            if not isinstance(event, ScoredTrajectory):
                raise ValueError(f"a {type(event).__name__} lies in {raw.position}")  # noqa: TRY004, TRY301
            scored = event
            about = scored.trajectory
            if self._admission.is_copy(about.group_id, about.sample, raw.position):
                return
            validate(scored, self._vocab_size, self._max_tokens)
            if self._hashes is not None:
                check_versions(scored, self._hashes)
            config = self._context.config
            check_reference(scored, config.trainer.loss, self._reference())
            is_replayed = config.trainer.routing_replay
            check_routing(scored, is_replayed=is_replayed, shape=self._routers)
            if scored.scores:
                self._reference_hash = self._reference_hash or scored.scores[0].reference_hash
            if self._admission.add(SeenSample.of(scored, raw.position), now_s):
                self._payloads.put(Payload(raw=raw, scored=scored))
                self.num_samples += 1
        except ValueError as err:
            self._bury(raw, scored, err, now_s)

    def _reference(self) -> str:
        """Hash of the reference's weights: the ledger's, or that of the first score; else ""."""
        if self._context.config.logprob.reference != START:
            return self._reference_hash
        return self._hashes.get(0, "") if self._hashes is not None else ""

    def _bury(
        self, raw: RawRecord, scored: ScoredTrajectory | None, err: ValueError, now_s: float
    ) -> None:
        letter = refusal(self._context, raw, scored, err)
        is_news = self._admission.dead(DeadSample.of(letter, raw.position), now_s)
        # A closed group's record has its dead letter already, by a predecessor or by us. One that
        # names no group of ours always gets one: no other event would show it.
        if raw.position not in self._buried and (is_news or not is_ours(letter)):
            self.letters.append(letter)
            self._buried[raw.position] = None

    def _dead(self, raw: RawRecord, now_s: float) -> None:
        for record in self._foreign.readable([raw]):
            if isinstance(record.event, DeadLetter):
                letter = record.event
                self._admission.dead(DeadSample.of(letter, raw.position), now_s)
                if letter.origin_topic == SCORED.name:
                    self._note(origin_of(letter), raw.position)
            return
        if self._reporter is not None:  # it names no sample of ours, and is only counted
            self._reporter.count(foreign_records=1)

    def _note(self, origin: Position, letter: Position) -> None:
        """Note a dead letter about `origin` that was read; of several the first one counts."""
        if self._buried.get(origin) is None and self._is_there(origin):
            self._buried[origin] = letter

    def _is_there(self, origin: Position) -> bool:
        """Whether there is such a record: a stranger's dead letter may name any position.

        The records of a poll's dead letters were written before them, so one request is enough.
        """
        partition = Partition(origin.topic, origin.partition)
        if partition not in self._old_ends:
            return False
        if origin.offset >= self._ends.get(partition, 0) and not self._has_asked:
            self._has_asked = True
            self._ends = self._bus.ends(SCORED.name)
        return 0 <= origin.offset < self._ends.get(partition, 0)


def _start_offsets(bus: Bus, start: tuple[PartitionPosition, ...]) -> dict[Partition, int]:
    offsets = {**bus.beginnings(SCORED.name), **bus.beginnings(DEAD_LETTERS.name)}
    for position in start:
        offsets[Partition(position.topic, position.partition)] = position.offset
    return offsets
