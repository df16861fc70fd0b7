"""Sessions as the log has them from before this worker: read once for each partition.

A worker that was killed, or that gave a partition away, has left calls of sessions that are not
over. They lie in the partition's own number of `calls` and `outcomes`, behind the time at which its
first open prompt was issued. Only the partition's holder can open a session there. Calls are
written outside of transactions, so a worker that lost the partition may still write some, of
sessions that it had opened: up to our own opening of a session they count, and are taken as well.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from contextlib import suppress

from rlstreams.schemas import DecodeError
from rlstreams.schemas.calls import JUDGED
from rlstreams.schemas.events import Event, Prompt, SessionOpened
from rlstreams.streams.log.bus import Bus, Reader
from rlstreams.streams.log.codec import decoded
from rlstreams.streams.log.errors import DeadlineError
from rlstreams.streams.log.group_ids import sample_name
from rlstreams.streams.log.record import Partition, Record
from rlstreams.streams.log.topics import CALLS, OUTCOMES
from rlstreams.streams.sessions.fold import SessionLog, apply_to
from rlstreams.streams.sessions.session import Session

CLOCKS_MS = 60_000  # by which clocks of two hosts may differ
DEADLINE_S = 90.0  # a dead worker's transaction is open for 30 s, and the broker may be away
BATCH = 500


class _Reading:
    """One partition, being read."""

    def __init__(self, bus: Bus, number: int, since_ms: int, *, keeps_judged: bool) -> None:
        spans = {
            Partition(topic.name, number): bus.written_since(
                Partition(topic.name, number), since_ms
            )
            for topic in (CALLS, OUTCOMES)
        }
        self.ends = {partition: end for partition, (begin, end) in spans.items() if begin < end}
        self.until_s = time.monotonic() + DEADLINE_S
        self.log = SessionLog()
        self.clients: dict[str, str] = {}  # of sessions of clients from outside: their groups
        self._taken: dict[str, tuple[Session, int]] = {}  # of others, until our start is read
        self._keeps_judged = keeps_judged
        self.reader: Reader | None = None
        self._behind: Reader | None = None  # of calls, beyond what was read at first
        calls = Partition(CALLS.name, number)
        self._next: dict[Partition, int] = {calls: spans[calls][1]}
        if self.ends:
            self.reader = bus.reader({p: spans[p][0] for p in self.ends})

    def poll(self, bus: Bus) -> None:
        """Read on, without waiting.

        Raises:
            DeadlineError: it does not come to its end; names where it is.
        """
        if self.reader is None:
            return
        for raw in self.reader.poll(BATCH, 0.0):
            with suppress(DecodeError):  # a stranger's bytes; the audit counts them
                self.log.apply(decoded(raw, bus.schemas()).event, raw.position.offset)
        at = self.reader.positions()
        behind = {p: end for p, end in self.ends.items() if at.get(p, 0) < end}
        if not behind:
            self.close()
            self.clients = {
                session.session_id: session.opened.client_group
                for session in self.log
                if session.opened is not None and session.opened.client_group
            }
            for session in list(self.log):
                kind = "" if session.closed is None else session.closed.kind
                if kind and not (self._keeps_judged and kind in JUDGED):  # its prompt is done
                    self.log.forget(session.session_id)
        elif time.monotonic() > self.until_s:
            where = "; ".join(f"{p}: at {at.get(p, 0)} of {end}" for p, end in behind.items())
            raise DeadlineError(
                f"reading what is recorded of sessions, {where}: not done within {DEADLINE_S:g} s; "
                "a transaction that nobody ends would hold it up: rlstreams doctor names it"
            )

    def take(self, session_id: str) -> Session:
        """Take the session as it is recorded, to go on with it."""
        session = self.log.sessions.pop(session_id, None) or Session(session_id=session_id)
        if session.starts and not session.is_closed:
            self._taken[session_id] = session, session.num_starts
        return session

    def caught_up(self, bus: Bus, session_id: str) -> bool:
        """Read on, without waiting; whether our opening of the session was met.

        Raises:
            DeadlineError: it is not met.
        """
        if self._behind is None:
            self._behind = bus.reader(self._next)
            self.until_s = time.monotonic() + DEADLINE_S
        for raw in self._behind.poll(BATCH, 0.0):
            with suppress(DecodeError):
                self._take(decoded(raw, bus.schemas()).event, raw.position.offset)
        self._next = dict(self._behind.positions())
        if session_id in self._taken:
            if time.monotonic() > self.until_s:
                raise DeadlineError(
                    f"reading session {session_id} up to the start that this worker has written, "
                    f"at {self._next}: not met within {DEADLINE_S:g} s"
                )
            return False
        if not self._taken:
            self._stop_behind()
        return True

    def _take(self, event: Event, offset: int) -> None:
        """Apply an event of a session that others have had; our own events are known."""
        named = getattr(event, "session_id", "")
        if named not in self._taken:
            if self.log.get(named) is not None:
                self.log.apply(event, offset)
            return
        session, start = self._taken[named]
        if isinstance(event, SessionOpened) and event.start == start:
            del self._taken[named]
            self.until_s = time.monotonic() + DEADLINE_S
        else:
            apply_to(session, event, offset)

    def close(self) -> None:
        """Let go of the readers."""
        if self.reader is not None:
            self.reader.close()
            self.reader = None
        self._stop_behind()

    def _stop_behind(self) -> None:
        if self._behind is not None:
            self._behind.close()
            self._behind = None


class History:
    """Sessions by partition; belongs to the role's loop.

    Args:
        keeps_judged: a session that closed and waits for its graders is kept.
    """

    def __init__(self, bus: Bus, *, keeps_judged: bool = False) -> None:
        self._bus = bus
        self._keeps_judged = keeps_judged
        self._readings: dict[int, _Reading] = {}

    def poll(self) -> None:
        """Read on in each partition that is being read."""
        for reading in self._readings.values():
            reading.poll(self._bus)

    def is_known(self, record: Record[Prompt]) -> bool:
        """Whether all that is recorded of its session was read; reading begins with the first
        prompt of a partition, which is the oldest that is open."""
        number = record.position.partition
        if number not in self._readings:
            since_ms = record.event.issued_at_ms - CLOCKS_MS
            self._readings[number] = _Reading(
                self._bus, number, since_ms, keeps_judged=self._keeps_judged
            )
            self._readings[number].poll(self._bus)
        return self._readings[number].reader is None

    def siblings(self, record: Record[Prompt]) -> Mapping[str, str]:
        """Sessions of a sample's group that clients from outside have had, and the clients' group;
        those that are over are among them."""
        prefix, clients = (
            f"{record.event.group_id}/",
            self._readings[record.position.partition].clients,
        )
        return {name: group for name, group in clients.items() if name.startswith(prefix)}

    def is_closed(self, record: Record[Prompt]) -> bool:
        """Whether its session is over: its outputs were committed with its close."""
        log = self._readings[record.position.partition].log
        return log.is_forgotten(session_of(record.event))

    def is_waiting(self, record: Record[Prompt]) -> bool:
        """Whether its session is over and waits for its graders."""
        log = self._readings[record.position.partition].log
        session = log.get(session_of(record.event))
        return session is not None and session.is_closed

    def take(self, record: Record[Prompt]) -> Session:
        """Take its session as it is recorded, to go on with it."""
        return self._readings[record.position.partition].take(session_of(record.event))

    def caught_up(self, record: Record[Prompt]) -> bool:
        """Whether all that others recorded of a session is taken, once our opening of it is
        committed: until then a worker that lost it may have written more calls."""
        reading = self._readings[record.position.partition]
        return reading.caught_up(self._bus, session_of(record.event))

    def forget(self, numbers: Iterable[int]) -> None:
        """Forget partitions that went away: others write there now."""
        for number in numbers:
            if (reading := self._readings.pop(number, None)) is not None:
                reading.close()

    def close(self) -> None:
        """Let go of readers."""
        self.forget(set(self._readings))


def session_of(prompt: Prompt) -> str:
    """The session of a sample."""
    return sample_name(prompt)
