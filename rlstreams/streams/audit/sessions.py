"""The audit's account of agents' sessions and calls.

Calls are read before trajectories, and of each closed session only digests stay: of each content of
a call, and of each sample that its tree allows. Which of them it is depends on the outcome that was
there when the sample was written, and outcomes may follow.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from rlstreams.schemas import encode
from rlstreams.schemas.calls import ENDED, LIMIT, REWARD
from rlstreams.schemas.events import (
    CallCommitted,
    CallReplayed,
    Event,
    OutcomeReported,
    Segment,
    SessionClosed,
    SessionOpened,
    TensorError,
    Trajectory,
)
from rlstreams.streams.audit.report import Breaches, BreachKind, Named
from rlstreams.streams.log.done_set import covered
from rlstreams.streams.log.record import Committed, Partition, Position
from rlstreams.streams.sessions.chain import NoChainError, main_chain, segments_of
from rlstreams.streams.sessions.fold import SessionLog

JUDGED = (ENDED, LIMIT)  # how a session closes whose outcome is a reward


@dataclass(slots=True, eq=False)
class Heard:
    """One session, as the audit remembers it."""

    is_opened: bool = False
    calls: dict[str, int] = field(default_factory=dict)  # digest of the first content, by id
    replays: set[tuple[int, str]] = field(default_factory=set)
    kind: str = ""  # how it closed; "": it is open
    closed_at: Position | None = None
    outcomes: set[str] = field(default_factory=set)
    is_judged: bool = False  # some outcome is a reward
    samples: frozenset[int] = frozenset()  # digests of those that its tree allows, once closed


class SessionsAudit:
    """Takes records of `calls` and `outcomes`, and the trajectories of samples with a session.

    Args:
        breaches: what is final is added here.
        duplicates: copies are named here.
        expired: first offset left by retention: what a session lacks there is no breach.
    """

    def __init__(
        self, breaches: Breaches, duplicates: Named, expired: Mapping[Partition, int]
    ) -> None:
        self._breaches = breaches
        self._duplicates = duplicates
        self._expired = expired
        self._log = SessionLog()  # of open sessions: trees, for their digests
        self.heard: dict[str, Heard] = {}
        self._written: dict[str, tuple[int | None, Position]] = {}  # trajectories by sample

    def take(self, event: Event, position: Position) -> bool:
        """Take a record; False: it is of no session."""
        match event:
            case SessionOpened() | CallCommitted() | CallReplayed() | SessionClosed():
                self._call(self._of(event.session_id), event, position)
            case OutcomeReported():
                heard = self._of(event.session_id)
                if event.outcome_id in heard.outcomes:
                    self._copy(event.session_id, position)
                else:
                    heard.outcomes.add(event.outcome_id)
                    heard.is_judged |= event.kind == REWARD
            case _:
                return False
        return True

    def _of(self, session_id: str) -> Heard:
        return self.heard.setdefault(session_id, Heard())

    def _call(
        self,
        heard: Heard,
        event: SessionOpened | CallCommitted | CallReplayed | SessionClosed,
        position: Position,
    ) -> None:
        name, is_expired = event.session_id, bool(self._expired.get(_partition(position)))
        if isinstance(event, CallCommitted):
            digest = _content(event)
            first = heard.calls.get(event.call_id)
            if first is not None:
                self._copy(name, position)
                if first != digest:
                    detail = f"{position} has another content than the first of {event.call_id}"
                    self._breaches.add(BreachKind.CALL_TWICE, name, detail)
                return
            if not heard.is_opened and not is_expired:
                detail = f"call {event.call_id} at {position}, and no start of its agent before it"
                self._breaches.add(BreachKind.UNOPENED_CALL, name, detail)
        is_replayed = isinstance(event, CallReplayed) and (
            (event.start, event.call_id) in heard.replays
        )
        if is_replayed or (isinstance(event, SessionClosed) and heard.kind):
            self._copy(name, position)
            return
        if heard.kind and not isinstance(event, SessionOpened):
            detail = f"{type(event).__name__} at {position}, closed at {heard.closed_at}"
            self._breaches.add(BreachKind.LATE_CALL, name, detail)
            return
        if not self._log.apply(event, position.offset):
            if not heard.kind:
                self._copy(name, position)
            return
        match event:
            case SessionOpened():
                heard.is_opened = True
            case CallCommitted():
                heard.calls[event.call_id] = digest
                self._check_link(name, event.call_id, is_expired=is_expired)
            case CallReplayed():
                heard.replays.add((event.start, event.call_id))
            case SessionClosed():
                heard.kind, heard.closed_at = event.kind or "unknown", position
                heard.samples = self._allowed(name)
                self._log.forget(name)

    def _copy(self, name: str, position: Position) -> None:
        self._duplicates.add(f"{name} again at {position}")

    def _check_link(self, name: str, call_id: str, *, is_expired: bool) -> None:
        session = self._log.get(name)
        problem = session.nodes[call_id].problem if session else ""
        if problem and not is_expired:
            self._breaches.add(BreachKind.BROKEN_CALL, name, f"call {call_id}: {problem}")

    def _allowed(self, name: str) -> frozenset[int]:
        """Digests of the samples that a session may have become."""
        session = self._log.get(name)
        if session is None:
            return frozenset()
        found = set()
        for terminal in (None, *session.nodes):
            try:
                found.add(_digest(segments_of(main_chain(session, terminal))))
            except (NoChainError, TensorError):
                continue
        return frozenset(found)

    def trajectory(self, name: str, event: Trajectory, position: Position) -> None:
        """Take the first trajectory of a sample with a session."""
        try:
            digest = _digest(event.segments)
        except TensorError:
            digest = None
        self._written[name] = digest, position

    def waits(self, name: str, assembled: Mapping[Partition, Committed] | None) -> bool:
        """Whether a closed session has no sample yet, because who assembles is not past it."""
        heard = self.heard.get(name)
        if heard is None or heard.closed_at is None or assembled is None:
            return False
        at = heard.closed_at
        return bool(assembled) and not covered(assembled.get(_partition(at)), at.offset)

    def check(self, breaches: Breaches, ended: Iterable[str]) -> None:
        """Breaches that only the whole shows.

        Args:
            ended: samples whose prompt is done with, and that nobody has next.
        """
        for name, (digest, position) in self._written.items():
            heard = self.heard[name]
            if heard.closed_at is None:
                detail = f"the sample at {position} is of a session that is not closed"
                breaches.add(BreachKind.FORGED_SAMPLE, name, detail)
            elif digest not in heard.samples and not self._expired.get(_partition(heard.closed_at)):
                detail = f"the sample at {position} is no path of its calls"
                breaches.add(BreachKind.FORGED_SAMPLE, name, detail)
        for name in ended:
            heard = self.heard.get(name, _NONE)
            if heard.kind in JUDGED and heard.is_judged:
                detail = f"{heard.kind} at {heard.closed_at}, judged, and no sample or dead letter"
                breaches.add(BreachKind.UNDELIVERED, name, detail)

    @property
    def by_kind(self) -> dict[str, int]:
        """Sessions by how they closed; `open`: those that are not."""
        counts = Counter(heard.kind or "open" for heard in self.heard.values())
        return dict(sorted(counts.items()))

    @property
    def num_calls(self) -> int:
        """Sampled calls."""
        return sum(len(heard.calls) for heard in self.heard.values())

    @property
    def num_replays(self) -> int:
        """Requests that were answered from the log."""
        return sum(len(heard.replays) for heard in self.heard.values())


_NONE = Heard()


def _partition(position: Position) -> Partition:
    return Partition(position.topic, position.partition)


def _content(event: CallCommitted) -> int:
    value = hashlib.sha256()
    for piece in encode(event):
        value.update(piece)
    return int.from_bytes(value.digest()[:8])


def _digest(segments: Iterable[Segment]) -> int:
    """Of authors, ids, versions, hashes and log-probs of all that has tokens."""
    value = hashlib.sha256()
    for one in segments:
        if not len(one.token_ids):
            continue
        value.update(repr((one.author, len(one.token_ids), one.policy_version)).encode())
        value.update(one.weight_hash.encode() + one.token_ids.numpy().astype("<i4").tobytes())
        if one.behavior_logprobs is not None:
            value.update(one.behavior_logprobs.numpy().astype("<f4").tobytes())
    return int.from_bytes(value.digest()[:8])
