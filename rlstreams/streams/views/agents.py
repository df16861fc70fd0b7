"""Figures by agent: ends of sessions, calls, tokens, latencies. Closed sessions only.

`AgentsView` counts all of them; `AgentsOfBatches` those of the samples of a step or an evaluation.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, field

from rlstreams.schemas.calls import CLOSED_KINDS
from rlstreams.schemas.events import Event
from rlstreams.streams.log.group_ids import group_of
from rlstreams.streams.log.record import NO_PLACE, Position
from rlstreams.streams.sessions.chain import NoChainError, main_chain, undelivered_share
from rlstreams.streams.sessions.figures import latency_s
from rlstreams.streams.sessions.fold import SessionLog
from rlstreams.streams.sessions.session import Session, sampled_tokens

NEWEST = 10_000  # calls whose latency counts


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentState:
    """Figures of one agent so far."""

    agent: str  # its name in the configuration; "": no start of it is in the log
    ended: Mapping[str, int]  # closed sessions by kind of close
    num_open: int
    num_calls: int  # sampled
    num_replays: int  # requests that were answered from the log
    num_tokens: int  # sampled
    num_beside: int  # sampled tokens not learnt from: beside the main chain, or auxiliary
    latencies_s: tuple[float, ...]  # of the newest calls, sorted

    @property
    def num_sessions(self) -> int:
        """Number of closed sessions."""
        return sum(self.ended.values())

    def latency_s(self, share: float) -> float | None:
        """Return the latency that this share of the newest calls did not exceed; None: no call."""
        if not self.latencies_s:
            return None
        last = len(self.latencies_s) - 1
        return self.latencies_s[min(last, int(share * len(self.latencies_s)))]

    @property
    def values(self) -> Mapping[str, float | None]:
        """Its figures by key: calls a session, seconds, shares in percent; None: not known yet."""
        answered = self.num_calls + self.num_replays
        return {
            "calls": self.num_calls / self.num_sessions if self.num_sessions else None,
            "latency_p50": self.latency_s(0.5),
            "latency_p95": self.latency_s(0.95),
            "replayed": 100 * self.num_replays / answered if answered else None,
            "beside": 100 * self.num_beside / self.num_tokens if self.num_tokens else None,
        }


@dataclass(slots=True)
class _Agent:
    ended: Counter[str] = field(default_factory=Counter)
    num_calls: int = 0
    num_replays: int = 0
    num_tokens: int = 0
    num_beside: int = 0
    latencies_s: deque[float] = field(default_factory=lambda: deque(maxlen=NEWEST))

    def take(self, session: Session) -> None:
        """Count a session that is over."""
        assert session.closed is not None, "only sessions that are over are counted"
        try:
            # Not by the call that a grader names: the same however far `outcomes` was read.
            chain = main_chain(session)
        except NoChainError:
            chain = None
        sampled = sum(map(sampled_tokens, session.calls))
        self.ended[session.closed.kind] += 1
        self.num_calls += len(session.calls)
        self.num_replays += len(session.replays)
        self.num_tokens += sampled
        self.num_beside += round(sampled * undelivered_share(session, chain))
        self.latencies_s.extend(map(latency_s, session.calls))


class _Closing:
    """Hands over each session as it closes, and forgets it."""

    def __init__(self, take: Callable[[Session], None]) -> None:
        self.log = SessionLog()
        self._take = take

    def apply(self, event: Event, position: Position | None) -> bool:
        """Take one event; return False if it is of no session, or changes nothing."""
        if not self.log.apply(event, NO_PLACE if position is None else position.offset):
            return False
        session = self.log.get(getattr(event, "session_id", ""))
        if session is not None and session.is_closed:
            self._take(session)
            self.log.forget(session.session_id)
        return True


class AgentsView:
    """Counts sessions as they close."""

    def __init__(self) -> None:
        self._agents: dict[str, _Agent] = {}
        self._closing = _Closing(
            lambda session: self._agents.setdefault(_name(session), _Agent()).take(session)
        )

    def apply(self, event: Event, position: Position | None = None) -> bool:
        """Take one event; False: it is of no session, or changes nothing."""
        return self._closing.apply(event, position)

    @property
    def state(self) -> tuple[AgentState, ...]:
        """All agents, by name; empty: the run has none."""
        begun = Counter(_name(one) for one in self._closing.log if one.starts or one.nodes)
        return tuple(
            _state(name, self._agents.get(name, _Agent()), begun[name])
            for name in sorted({*self._agents, *begun})
        )


class AgentsOfBatches:
    """Keeps closed sessions by group until the group is over: so its figures are the same, whenever
    and however far the log was read."""

    def __init__(self) -> None:
        self._of: defaultdict[str, list[Session]] = defaultdict(list)
        self._closing = _Closing(self._keep)

    def _keep(self, session: Session) -> None:
        self._of[group_of(session.session_id)].append(session)

    def apply(self, event: Event, position: Position | None = None) -> bool:
        """Take one event; False: it is of no session, or changes nothing."""
        return self._closing.apply(event, position)

    @property
    def groups(self) -> Iterable[str]:
        """Groups with kept sessions."""
        return list(self._of)

    def take(
        self, groups: Iterable[str], samples: Container[str] | None = None
    ) -> tuple[AgentState, ...]:
        """Return the agents of these groups' sessions, and forget the sessions.

        Args:
            samples: samples whose sessions count; None: all.
        """
        agents: defaultdict[str, _Agent] = defaultdict(_Agent)
        for group in groups:
            for session in self._of.pop(group, ()):
                if samples is None or session.session_id in samples:
                    agents[_name(session)].take(session)
        return tuple(_state(name, agents[name], 0) for name in sorted(agents))


def _in_order(kinds: Iterable[str]) -> list[str]:
    """Ours first, in their order; then those of newer releases."""
    places = {kind: place for place, kind in enumerate(CLOSED_KINDS)}
    return sorted(kinds, key=lambda kind: (places.get(kind, len(places)), kind))


def _state(name: str, one: _Agent, num_open: int) -> AgentState:
    return AgentState(
        agent=name,
        ended={kind: one.ended[kind] for kind in _in_order(one.ended)},
        num_open=num_open,
        num_calls=one.num_calls,
        num_replays=one.num_replays,
        num_tokens=one.num_tokens,
        num_beside=one.num_beside,
        latencies_s=tuple(sorted(one.latencies_s)),
    )


def _name(session: Session) -> str:
    return session.opened.agent if session.opened is not None else ""
