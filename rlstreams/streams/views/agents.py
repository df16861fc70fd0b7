"""What agents do, by agent: how their sessions end, what their calls take. Of closed sessions."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from rlstreams.schemas.calls import CLOSED_KINDS
from rlstreams.schemas.events import Event
from rlstreams.streams.log.record import NO_PLACE, Position
from rlstreams.streams.sessions.chain import NoChainError, main_chain, undelivered_share
from rlstreams.streams.sessions.figures import latency_s
from rlstreams.streams.sessions.fold import SessionLog
from rlstreams.streams.sessions.session import Session, sampled_tokens

NEWEST = 10_000  # calls whose latency counts


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentState:
    """One agent by now."""

    agent: str  # its name in the configuration; "": no start of it is in the log
    ended: Mapping[str, int]  # sessions by how they closed
    num_open: int
    num_calls: int  # sampled
    num_replays: int  # requests that were answered from the log
    num_tokens: int  # sampled
    num_beside: int  # of these, not learnt from: beside the main chain, or auxiliary
    latencies_s: tuple[float, ...]  # of the newest calls, sorted

    @property
    def num_sessions(self) -> int:
        """That are over."""
        return sum(self.ended.values())

    def latency_s(self, share: float) -> float | None:
        """That this share of the newest calls did not exceed; None: there is none."""
        if not self.latencies_s:
            return None
        last = len(self.latencies_s) - 1
        return self.latencies_s[min(last, int(share * len(self.latencies_s)))]


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
            # Whatever a grader names later: the same however far `outcomes` was read.
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


class AgentsView:
    """Counts sessions as they close, and forgets them."""

    def __init__(self) -> None:
        self._log = SessionLog()
        self._agents: dict[str, _Agent] = {}

    def apply(self, event: Event, position: Position | None = None) -> bool:
        """Take one event; False: it is of no session, or changes nothing."""
        if not self._log.apply(event, NO_PLACE if position is None else position.offset):
            return False
        session = self._log.get(getattr(event, "session_id", ""))
        if session is not None and session.is_closed:
            self._agents.setdefault(_name(session), _Agent()).take(session)
            self._log.forget(session.session_id)
        return True

    @property
    def state(self) -> tuple[AgentState, ...]:
        """All agents, by name; none: the run has none."""
        begun = Counter(_name(one) for one in self._log if one.starts or one.nodes)
        return tuple(
            AgentState(
                agent=name,
                ended={kind: one.ended[kind] for kind in CLOSED_KINDS if one.ended[kind]},
                num_open=begun[name],
                num_calls=one.num_calls,
                num_replays=one.num_replays,
                num_tokens=one.num_tokens,
                num_beside=one.num_beside,
                latencies_s=tuple(sorted(one.latencies_s)),
            )
            for name in sorted({*self._agents, *begun})
            for one in [self._agents.get(name, _Agent())]
        )


def _name(session: Session) -> str:
    return session.opened.agent if session.opened is not None else ""
