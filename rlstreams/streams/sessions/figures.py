"""Figures of one session for screens: starts, tree of calls, outcomes. Pure; no layout."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from rlstreams.schemas.events import CallCommitted
from rlstreams.streams.sessions.chain import (
    Chain,
    NoChainError,
    is_learnt_from,
    main_chain,
    undelivered_share,
)
from rlstreams.streams.sessions.session import Node, Session, sampled_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """One message."""

    role: str
    text: str
    thought: str = ""
    tools: tuple[str, ...] = ()  # tools that it calls: `name(arguments)`


@dataclass(frozen=True, slots=True, kw_only=True)
class Spoken:
    """The messages of a call: its request and its answer."""

    asked: tuple[Said, ...] = ()
    answer: Said | None = None
    is_rest: bool = False  # `asked` has the new part alone: it was read from token ids


Words: TypeAlias = Callable[[CallCommitted], Spoken]


@dataclass(frozen=True, slots=True, kw_only=True)
class StartFigures:
    """One start of its agent."""

    number: int
    after_s: float | None  # from the first start; None: the time is not recorded
    worker: str
    num_calls: int  # calls that it sampled
    num_replays: int  # its requests that were answered from the log
    is_lost: bool  # another start followed: it was killed, or its worker was


@dataclass(frozen=True, slots=True, kw_only=True)
class CallFigures:
    """One call in its tree."""

    number: int  # in commit order, from 0
    call_id: str
    depth: int  # calls above it
    level: int  # branches that lead to it: a dialogue that never forks has level 0
    is_branch: bool  # its parent goes on with another call
    parent: int | None  # number of the call that it continues
    asked: tuple[Said, ...]  # messages that are new since its parent
    answer: Said | None
    after_s: float | None  # from the first start to its request; None: the time is not recorded
    parallel: tuple[int, ...]  # numbers of calls that were under way at the same time
    why_root: str  # why it continues no call, or why its prompt is not known
    start: int  # start of its agent that it was sampled in
    prompt_tokens: int
    new_tokens: int  # of the prompt, behind the parent's answer
    sampled_tokens: int
    versions: tuple[int, ...]  # versions that sampled it, each once, in order
    latency_s: float  # from the request to its answer
    finish_reason: str
    replayed_in: tuple[int, ...]  # starts that were answered by it from the log
    is_delivered: bool  # its tokens are learnt from, in the session's sample
    is_in_sample: bool  # its tokens are in the sample
    why_not_learnt: str  # why its tokens cannot be learnt from; "": they can


@dataclass(frozen=True, slots=True, kw_only=True)
class OutcomeFigures:
    """One outcome of the session or of a call."""

    outcome_id: str
    grader: str
    kind: str
    reward: float
    parts: dict[str, float]
    note: str
    call: int | None  # number of the call that it is about; None: the session, or an unknown one
    after_s: float | None  # from the close; None: it is open, or the time is not recorded
    is_standing: bool  # no later one took its place


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionFigures:
    """Figures of one session."""

    session_id: str
    agent: str
    state: str  # kind of its close, or "open"
    detail: str
    seconds: float | None  # from its first start to its close
    num_starts: int
    starts: tuple[StartFigures, ...]  # those that are in the log, by number
    num_replays: int
    calls: tuple[CallFigures, ...]  # each below the one that it continues
    failures: tuple[tuple[int, int, str], ...]  # start, status of HTTP, reason
    outcomes: tuple[OutcomeFigures, ...]  # as they came
    undelivered: float  # share of sampled tokens that its sample does not bring as the policy's
    num_sampled: int  # sampled tokens
    ties: int  # other calls as deep as the sample's last
    problem: str  # why it has no sample; "": it has one


def session_figures(session: Session, words: Words = lambda _: Spoken()) -> SessionFigures:
    """Return the figures of a session, as far as it was read.

    Args:
        words: returns the messages of a call; by default none.
    """
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
        starts=tuple(_starts(session, begun_ms)),
        num_replays=len(session.replays),
        calls=tuple(_calls(session, chain, words, begun_ms)),
        failures=tuple((one.start, one.status, one.reason) for one in session.failed),
        outcomes=tuple(_outcomes(session)),
        undelivered=undelivered_share(session, chain),
        num_sampled=sum(sampled_tokens(call) for call in session.calls),
        ties=0 if chain is None else len(chain.ties),
        problem=problem,
    )


def _starts(session: Session, begun_ms: int) -> Iterator[StartFigures]:
    calls = Counter(node.call.start for node in session.nodes.values())
    replays = Counter(start for start, _ in session.replays)
    for number, one in sorted(session.starts.items()):
        yield StartFigures(
            number=number,
            after_s=_after_s(one.at_ms, begun_ms),
            worker=one.worker,
            num_calls=calls[number],
            num_replays=replays[number],
            is_lost=number + 1 < session.num_starts,
        )


def _after_s(at_ms: int, begun_ms: int) -> float | None:
    return (at_ms - begun_ms) / 1000 if at_ms and begun_ms else None


def in_tree_order(session: Session, straight: Collection[Node]) -> list[Node]:
    """Return each call behind the call that it continues: branches in commit order, then the call
    that goes straight on; roots in commit order."""
    below = _below(session)
    found: list[Node] = []
    left = list(reversed(below.get(None, [])))
    while left:
        node = left.pop()
        found.append(node)
        behind = sorted(below.get(node, []), key=lambda one: one in straight)
        left += reversed(behind)
    return found


def _below(session: Session) -> dict[Node | None, list[Node]]:
    below: dict[Node | None, list[Node]] = {}
    for node in session.nodes.values():
        below.setdefault(node.parent, []).append(node)
    return below


def _straight(session: Session, chain: Chain | None) -> set[Node]:
    """Return, for each call, the call below that goes straight on: the sample's, or the first."""
    main = set() if chain is None else set(chain.nodes)
    return {
        next((node for node in nodes if node in main), nodes[0])
        for parent, nodes in _below(session).items()
        if parent is not None
    }


def _chain(session: Session) -> tuple[Chain | None, str]:
    try:
        return main_chain(session, session.terminal), ""
    except NoChainError as err:
        return None, str(err)


def _calls(
    session: Session, chain: Chain | None, words: Words, begun_ms: int
) -> Iterator[CallFigures]:
    straight, levels = _straight(session, chain), dict[Node, int]()
    delivered = frozenset() if chain is None else chain.delivered
    spoken = {node: words(node.call) for node in session.nodes.values()}
    parallel = _parallel(list(session.nodes.values()))
    for node in in_tree_order(session, straight):
        call, is_branch = node.call, node.parent is not None and node not in straight
        levels[node] = is_branch + (0 if node.parent is None else levels[node.parent])
        is_in = node in delivered
        why_not = f"constrained by {call.constrained}" if call.constrained else ""
        yield CallFigures(
            number=node.number,
            call_id=call.call_id,
            depth=node.depth,
            level=levels[node],
            is_branch=is_branch,
            parent=None if node.parent is None else node.parent.number,
            asked=_new(node, spoken),
            answer=spoken[node].answer,
            after_s=_after_s(call.received_at_ms, begun_ms),
            parallel=tuple(parallel[node]),
            why_root=node.problem or call.why_root,
            start=call.start,
            prompt_tokens=call.prompt_tokens,
            new_tokens=len(call.new_ids),
            sampled_tokens=sampled_tokens(call),
            versions=tuple(
                dict.fromkeys(s.policy_version for s in call.segments if len(s.token_ids))
            ),
            latency_s=latency_s(call),
            finish_reason=call.finish_reason,
            replayed_in=tuple(start for start, name in session.replays if name == call.call_id),
            is_delivered=is_in and is_learnt_from(call),
            is_in_sample=is_in,
            why_not_learnt=why_not or ("" if call.is_trained else "auxiliary"),
        )


def latency_s(call: CallCommitted) -> float:
    """Return the seconds from the request to its answer."""
    return max(0, call.finished_at_ms - call.received_at_ms) / 1000


def _new(node: Node, spoken: Mapping[Node, Spoken]) -> tuple[Said, ...]:
    """Return the messages that follow its parent's messages and answer."""
    own = spoken[node]
    before = None if node.parent is None else spoken[node.parent]
    if own.is_rest or before is None or before.is_rest:
        return own.asked
    return own.asked[len(before.asked) + 1 :]


def _parallel(nodes: Sequence[Node]) -> dict[Node, list[int]]:
    """Return the numbers of calls of the same start that each call was under way with."""
    found: dict[Node, list[int]] = {node: [] for node in nodes}
    under_way: list[Node] = []
    for node in sorted(nodes, key=lambda node: node.call.received_at_ms):
        call = node.call
        under_way = [one for one in under_way if one.call.finished_at_ms > call.received_at_ms]
        for one in under_way:
            if one.call.start == call.start:
                found[one].append(node.number)
                found[node].append(one.number)
        under_way.append(node)
    return {node: sorted(numbers) for node, numbers in found.items()}


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
