"""Agents' sessions: the one fold of `calls` and `outcomes`.

Each topic comes in the order of its partition, in any order between the two, and the end is the
same. The first record of a call id, of a start, of a close and of an outcome id counts; a copy
changes nothing. Behind the first close no call counts, and behind the opening of a start no call of
an earlier start.

`forget` drops a session; only its id is remembered, so that a copy does not begin it anew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

from rlstreams.schemas.events import (
    CallCommitted,
    CallFailed,
    CallReplayed,
    Event,
    OutcomeReported,
    SessionClosed,
    SessionOpened,
)
from rlstreams.streams.log.record import NO_PLACE
from rlstreams.streams.sessions.session import Session

OfSession: TypeAlias = (
    SessionOpened | CallCommitted | CallReplayed | CallFailed | SessionClosed | OutcomeReported
)
_TAKES: dict[type[Event], Callable[[Session, Any, int], bool]] = {
    SessionOpened: lambda session, event, _: session.open(event),
    CallCommitted: Session.commit,
    CallReplayed: lambda session, event, _: session.replay(event),
    CallFailed: lambda session, event, _: session.fail(event),
    SessionClosed: lambda session, event, _: session.close(event),
    OutcomeReported: lambda session, event, _: session.judge(event),
}
_BITS = 256  # samples of a group that are remembered as bits


class SessionLog:
    """All sessions of a run, or of some of its partitions. `apply` takes every event."""

    def __init__(self) -> None:
        self.sessions: dict[str, Session] = {}  # by id, in the order in which they were met
        self.num_forgotten = 0
        self._forgotten: dict[str, int] = {}  # by group, a bit for each sample
        self._others: set[str] = set()  # forgotten sessions whose id is no sample's

    def __iter__(self) -> Iterator[Session]:
        return iter(self.sessions.values())

    def get(self, session_id: str) -> Session | None:
        """Return a session; None: unknown, or forgotten."""
        return self.sessions.get(session_id)

    def apply(self, event: Event, offset: int = NO_PLACE) -> bool:
        """Take one event, and its record's offset if known.

        Returns:
            False: it changes nothing: a copy, a call behind the close, a session that was
            forgotten, an event of another topic.
        """
        if not isinstance(event, OfSession):
            return False
        session = self._session(event.session_id, event, offset)
        return session is not None and apply_to(session, event, offset)

    def forget(self, session_id: str) -> None:
        """Drop a session; its later records change nothing."""
        if self.sessions.pop(session_id, None) is None:
            return
        self.num_forgotten += 1
        group, bit = _bit(session_id)
        if bit:
            self._forgotten[group] = self._forgotten.get(group, 0) | bit
        else:
            self._others.add(session_id)

    def is_forgotten(self, session_id: str) -> bool:
        """Whether the session was there, and was dropped."""
        group, bit = _bit(session_id)
        return bool(self._forgotten.get(group, 0) & bit) if bit else session_id in self._others

    def _session(self, session_id: str, event: OfSession, offset: int) -> Session | None:
        found = self.sessions.get(session_id)
        if found is None:
            if self.is_forgotten(session_id):
                return None
            found = self.sessions[session_id] = Session(session_id=session_id)
        if found.first_offset == NO_PLACE and not isinstance(event, OutcomeReported):
            found.first_offset = offset
        return found


def apply_to(session: Session, event: Event, offset: int) -> bool:
    """Take one event of a session; see `SessionLog.apply`."""
    takes = _TAKES.get(type(event))
    return takes is not None and takes(session, event, offset)


def _bit(session_id: str) -> tuple[str, int]:
    """Return group and bit of a sample's session; bit 0: the id is no sample's."""
    group, _, number = session_id.rpartition("/")
    is_small = number.isascii() and number.isdecimal() and str(int(number[:4])) == number
    return group, 1 << int(number) if group and is_small and int(number) < _BITS else 0
