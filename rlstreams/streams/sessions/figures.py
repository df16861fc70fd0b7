"""What is shown of one session: its tree of calls, and its outcomes in order. Pure; no layout."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rlstreams.streams.sessions.chain import (
    Chain,
    NoChainError,
    is_learnt_from,
    main_chain,
    undelivered_share,
)
from rlstreams.streams.sessions.session import Node, Session, sampled_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class CallFigures:
    """One call in its tree."""

    number: int  # in commit order, from 0
    call_id: str
    depth: int  # calls above it
    parent: int | None  # number of the call that it continues
    why_root: str  # why it continues none, or why its prompt is not known
    start: int  # of its agent, that it was sampled in
    prompt_tokens: int
    new_tokens: int  # of the prompt, behind the parent's answer
    sampled_tokens: int
    versions: tuple[int, ...]  # that sampled it, each once, in order
    latency_s: float  # from the request to its answer
    finish_reason: str
    replayed_in: tuple[int, ...]  # starts that were answered by it from the log
    is_delivered: bool  # its tokens are learnt from, in the session's sample
    is_in_sample: bool  # they are in it
    why_not_learnt: str  # "": they could be


@dataclass(frozen=True, slots=True, kw_only=True)
class OutcomeFigures:
    """What was said of it, once."""

    outcome_id: str
    grader: str
    kind: str
    reward: float
    parts: dict[str, float]
    note: str
    call: int | None  # number of the call that it is about; None: the session, or an unknown one
    after_s: float | None  # from the close; None: it is open, or nobody told the time
    is_standing: bool  # no later one took its place


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionFigures:
    """One session."""

    session_id: str
    agent: str
    state: str  # how it closed; "open"
    detail: str
    seconds: float | None  # from its first start to its close
    num_starts: int
    num_replays: int
    calls: tuple[CallFigures, ...]  # each below the one that it continues
    failures: tuple[tuple[int, int, str], ...]  # start, status of HTTP, reason
    outcomes: tuple[OutcomeFigures, ...]  # as they came
    undelivered: float  # share of sampled tokens that its sample does not bring as the policy's
    num_sampled: int  # tokens
    ties: int  # other calls as deep as the sample's last
    problem: str  # why there is no sample of it; ""


def session_figures(session: Session) -> SessionFigures:
    """All of a session, as far as it is known."""
    chain, problem = _chain(session)
    closed, opened = session.closed, session.opened
    begun_ms = opened.at_ms if opened else closed.opened_at_ms if closed else 0
    return SessionFigures(
        session_id=session.session_id,
        agent=opened.agent if opened else "",
        state=closed.kind if closed else "open",
        detail=closed.detail if closed else "",
        seconds=(closed.at_ms - begun_ms) / 1000 if closed and begun_ms else None,
        num_starts=session.num_starts,
        num_replays=len(session.replays),
        calls=tuple(_call(session, node, chain) for node in in_tree_order(session)),
        failures=tuple((one.start, one.status, one.reason) for one in session.failed),
        outcomes=tuple(_outcomes(session)),
        undelivered=undelivered_share(session, chain),
        num_sampled=sum(sampled_tokens(call) for call in session.calls),
        ties=0 if chain is None else len(chain.ties),
        problem=problem,
    )


def in_tree_order(session: Session) -> list[Node]:
    """Each call right below the one that it continues, siblings and roots in commit order."""
    below: dict[Node | None, list[Node]] = {}
    for node in session.nodes.values():
        below.setdefault(node.parent, []).append(node)
    found: list[Node] = []
    left = list(reversed(below.get(None, [])))
    while left:
        node = left.pop()
        found.append(node)
        left += reversed(below.get(node, []))
    return found


def _chain(session: Session) -> tuple[Chain | None, str]:
    try:
        return main_chain(session, session.terminal), ""
    except NoChainError as err:
        return None, str(err)


def _call(session: Session, node: Node, chain: Chain | None) -> CallFigures:
    call = node.call
    is_in = chain is not None and node in chain.nodes
    sampled = [s.policy_version for s in call.segments if len(s.token_ids)]
    why_not = f"constrained by {call.constrained}" if call.constrained else ""
    return CallFigures(
        number=node.number,
        call_id=call.call_id,
        depth=node.depth,
        parent=None if node.parent is None else node.parent.number,
        why_root=node.problem or call.why_root,
        start=call.start,
        prompt_tokens=call.prompt_tokens,
        new_tokens=len(call.new_ids),
        sampled_tokens=sampled_tokens(call),
        versions=tuple(dict.fromkeys(sampled)),
        latency_s=max(0, call.finished_at_ms - call.received_at_ms) / 1000,
        finish_reason=call.finish_reason,
        replayed_in=tuple(start for start, name in session.replays if name == call.call_id),
        is_delivered=is_in and is_learnt_from(call),
        is_in_sample=is_in,
        why_not_learnt=why_not or ("" if call.is_trained else "auxiliary"),
    )


def _outcomes(session: Session) -> Iterator[OutcomeFigures]:
    standing = {one.outcome_id for one in session.standing}
    for one in session.outcomes.values():
        about = session.nodes.get(one.call_id) if one.call_id is not None else None
        closed_ms = session.closed.at_ms if session.closed else 0
        yield OutcomeFigures(
            outcome_id=one.outcome_id,
            grader=one.grader,
            kind=one.kind,
            reward=one.reward,
            parts=one.parts,
            note=one.note,
            call=None if about is None else about.number,
            after_s=(one.at_ms - closed_ms) / 1000 if closed_ms and one.at_ms else None,
            is_standing=one.outcome_id in standing,
        )
