"""Sessions that are closed and wait for their graders: their prompts are open, no agent runs.

Outcomes are read from the partitions of `outcomes` whose prompts this worker has, from the issue of
the oldest one on. A worker that takes a partition over finds the closed session in the log and its
prompt among the open ones, and waits on: until the same time, which counts from the close, and
never longer than the whole deadline, whatever the clock of the host before was.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from rlstreams.schemas import DecodeError
from rlstreams.schemas.events import OutcomeReported, Prompt
from rlstreams.streams.log.bus import Bus, Reader
from rlstreams.streams.log.codec import decoded, now_ms
from rlstreams.streams.log.record import Partition, Record
from rlstreams.streams.log.topics import OUTCOMES
from rlstreams.streams.sessions.fold import SessionLog
from rlstreams.streams.sessions.session import Session
from rlstreams.streams.sessions.verdict import Verdict, verdict_of
from rlstreams.workers.config.agents import OutcomeSection

CLOCKS_MS = 60_000  # by which clocks of two hosts may differ
BATCH = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class Decided:
    """A session whose waiting is over."""

    record: Record[Prompt]
    session: Session
    verdict: Verdict


class LateOutcomes:
    """Closed sessions and the outcomes that they wait for; belongs to the role's loop."""

    def __init__(self, bus: Bus, section: OutcomeSection) -> None:
        self._bus = bus
        self._section = section
        self._reader: Reader | None = None
        self._said = SessionLog()  # outcomes alone
        self._waiting: dict[str, tuple[Record[Prompt], Session]] = {}
        self._until_s: dict[str, float] = {}  # monotonic, by session

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def graders(self) -> tuple[str, ...]:
        """Names of the graders that are waited for; empty: none."""
        return self._section.wait_for

    def listen(self, record: Record[Prompt]) -> None:
        """Read outcomes of a partition's sessions, from this prompt on: the oldest open one."""
        at = {} if self._reader is None else dict(self._reader.positions())
        partition = Partition(OUTCOMES.name, record.position.partition)
        if not self.graders or partition in at:
            return
        since_ms = record.event.issued_at_ms - CLOCKS_MS
        at[partition] = self._bus.written_since(partition, since_ms)[0]
        if self._reader is None:
            self._reader = self._bus.reader(at)
        else:
            self._reader.seek(at)

    def add(self, record: Record[Prompt], session: Session) -> None:
        """Wait for the outcomes of a closed session."""
        assert session.closed is not None, "only closed sessions wait"
        passed_s = (now_ms() - session.closed.at_ms) / 1000
        left_s = min(self._section.deadline_s, self._section.deadline_s - passed_s)
        self._waiting[session.session_id] = (record, session)
        self._until_s[session.session_id] = time.monotonic() + left_s

    def decided(self) -> Iterator[Decided]:
        """Sessions whose graders have spoken, or did not in time; each once."""
        self._read()
        for name, (record, session) in list(self._waiting.items()):
            if (said := self._said.get(name)) is not None:
                for outcome in said.outcomes.values():
                    session.judge(outcome)
            is_over = time.monotonic() >= self._until_s[name]
            verdict = verdict_of(session, self.graders, is_over=is_over)
            if verdict is not None:
                del self._waiting[name], self._until_s[name]
                self.dismiss(name)
                yield Decided(record=record, session=session, verdict=verdict)

    def dismiss(self, session_id: str) -> None:
        """Keep nothing of what was or will be said of a session that waits no longer."""
        self._said.sessions.setdefault(session_id, Session(session_id=session_id))
        self._said.forget(session_id)

    def _read(self) -> None:
        if self._reader is None:
            return
        for raw in self._reader.poll(BATCH, 0.0):
            try:
                event = decoded(raw, self._bus.schemas()).event
            except DecodeError:
                continue  # a stranger's; the audit counts it
            if isinstance(event, OutcomeReported):
                self._said.apply(event)

    def forget(self, numbers: Iterable[int]) -> None:
        """Forget partitions that went away."""
        gone = set(numbers)
        kept = {n: one for n, one in self._waiting.items() if one[0].position.partition not in gone}
        self._waiting = kept
        self._until_s = {name: self._until_s[name] for name in kept}
        if self._reader is not None:
            at = self._reader.positions()
            self._reader.seek({p: offset for p, offset in at.items() if p.number not in gone})

    def close(self) -> None:
        """Let go of the reader."""
        if self._reader is not None:
            self._reader.close()
            self._reader = None
