"""What of a session is learnt from beside its main chain: each token once, behind what it saw."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from rlstreams.schemas.events import Segment, SessionOpened, Tensor
from rlstreams.streams.audit.report import Breaches, CountedNames
from rlstreams.streams.audit.sessions import SessionsAudit
from rlstreams.streams.log.record import Position
from rlstreams.streams.rows import row_places, rows_of_sample
from rlstreams.streams.sessions.chain import (
    NoChainError,
    experts_of,
    is_learnt_from,
    main_chain,
    off_path,
    segments_of,
    undelivered_share,
)
from rlstreams.streams.sessions.session import Session, sampled_tokens
from rlstreams.workers.loop.validation import check_trajectory
from tests.call_events import call_replayed, session_closed, session_opened
from tests.factories import trajectory
from tests.random_sessions import Played, played
from tests.unit.sessions.test_chain import chain_ids, flat
from tests.unit.sessions.test_fold import call, folded

OPENED = session_opened(branches=True)


def with_branches(log: Played) -> list[object]:
    found = [replace(e, branches=True) if isinstance(e, SessionOpened) else e for e in log.calls]
    return [*found] if any(type(e).__name__ == "SessionClosed" for e in found) else [
        *found, session_closed(),
    ]  # fmt: skip


def wanted(session: Session) -> set[str]:
    return {
        node.call.call_id
        for node in session.newest
        if is_learnt_from(node.call) and sampled_tokens(node.call)
    }


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**32))
def test_each_token_that_counts_is_the_policys_in_one_row(seed: int) -> None:
    """Behind all that the model saw before it; and the audit, which has a fold of its own, agrees.
    With a token twice, or a branch that is none, it does not."""
    log = played(seed)
    events = with_branches(log)
    session = folded(*events)
    try:
        chain = main_chain(session)
    except NoChainError:  # nothing of its main chain is learnt from
        return
    if not chain.trained_tokens:
        assert chain.branches == ()
        return
    sample = trajectory(segments=segments_of(chain), routed_experts=None)
    check_trajectory(sample, 200, 10_000)
    rows = [flat(sample.segments[p.start : p.stop]) for p in row_places(sample)]
    assert len(rows) == len(chain.rows)
    for row, path in zip(rows, chain.rows, strict=True):
        assert row == log.saw[path.nodes[-1].call.call_id][: len(row)]
    told = Counter(id(s) for s in sample.segments if s.author == "policy" and len(s.token_ids))
    delivered = {node.call.call_id for node in chain.delivered}
    assert wanted(session) <= delivered
    assert told == Counter(
        id(s)
        for node in session.nodes.values()
        if node.call.call_id in delivered and is_learnt_from(node.call)
        for s in node.call.segments
        if len(s.token_ids)
    )
    assert off_path(session, chain) == sum(
        sampled_tokens(c) for c in session.calls if c.call_id not in delivered
    )
    forged = [(sample.segments, {})]
    first = next(s for s in sample.segments if s.author == "policy" and len(s.token_ids))
    prompt = next(s for s in sample.segments if s.author == "prompt")
    forged.append(((*sample.segments, prompt, first), {"forged sample": 1}))  # a word again
    other = replace(first, policy_version=first.policy_version + 9)
    forged.append(((*sample.segments, prompt, other), {"forged sample": 1}))  # nobody's
    for segments, expected in forged:
        assert audited(events, segments) == expected


def audited(events: Sequence[Any], segments: tuple[Segment, ...]) -> dict[str, int]:
    """What the audit says of a session with this sample."""
    breaches = Breaches()
    audit = SessionsAudit(breaches, CountedNames(), {})
    for offset, event in enumerate(events):
        audit.take(event, Position("calls", 0, offset))
    audit.trajectory("7/1", trajectory(segments=segments), Position("trajectories", 0, 0))
    audit.check(breaches, [])
    return dict(breaches.counts)


def test_calls_that_said_the_same_are_a_row_each() -> None:
    """Sub-agents that were asked the same may sample the same tokens: these are other tokens, and
    learnt from as often as they were sampled, and no oftener."""
    events = [OPENED, call("a"), call("twin"), call("third"), session_closed()]
    segments = segments_of(main_chain(folded(*events[:-1])))
    authors = [segment.author for segment in segments]
    assert authors == ["prompt", "policy"] * 3
    assert segments[:2] == segments[2:4] == segments[4:]
    assert audited(events, segments) == {}
    assert audited(events, (*segments, *segments[:2])) == {"forged sample": 1}


def forked() -> Session:
    """a, b and c go on from each other; d forks behind a, e behind d; f is a sub-agent."""
    return folded(
        OPENED,
        call("a"),
        call("b", "a", before=5),
        call("d", "a", before=5, new=1),
        call("e", "d", before=9),
        call("c", "b", before=10),
        call("f"),
    )


def test_forks_and_new_histories_are_rows() -> None:
    """A row begins with the prompt that its first answer had, and holds what nobody told before."""
    session = forked()
    chain = main_chain(session)
    rows = [([n.call.call_id for n in r.nodes], r.num_known) for r in chain.rows]
    assert rows == [(["a", "b", "c"], 0), (["a", "d", "e"], 1), (["f"], 0)]
    authors = [segment.author for segment in segments_of(chain)]
    env = ["policy", "environment"]
    assert authors == ["prompt", *env, *env, "policy", "prompt", *env, "policy", "prompt", "policy"]
    assert (undelivered_share(session, chain), off_path(session, chain)) == (0.0, 0)


def test_without_being_asked_for_there_are_none() -> None:
    """Nor of held-out rows; nor behind the answer that was judged, or below it."""
    calls = [node.call for node in forked().nodes.values()]
    for opened in (session_opened(), session_opened(branches=True, purpose="evaluate")):
        assert main_chain(folded(opened, *calls)).branches == ()
    judged = main_chain(folded(OPENED, *calls), "b")
    assert [[n.call.call_id for n in r.own] for r in judged.rows] == [["a", "b"], ["d", "e"], ["f"]]


def test_an_answer_that_nobody_heard_is_neither_the_end_nor_a_branch() -> None:
    """Its client had hung up, and asked anew: as a root, and one turn deeper than the rest."""
    lost_root = [call("lost", unheard=True), call("a"), call("b", "a", before=5)]
    assert chain_ids(main_chain(folded(OPENED, *lost_root))) == ["a", "b"]
    again = [call("a"), call("kept", "a", before=5), call("lost", "a", before=5, unheard=True)]
    chain = main_chain(folded(OPENED, *again))
    assert (chain_ids(chain), chain.ties, chain.branches) == (["a", "kept"], (), ())
    deeper = [call("a"), call("b", "a", before=5), call("c", "b", before=10, unheard=True)]
    assert chain_ids(main_chain(folded(*deeper))) == ["a", "b"]
    assert chain_ids(main_chain(folded(call("a", unheard=True)))) == ["a"]  # there is no other


def test_an_answer_that_was_heard_later_is_one() -> None:
    """By a retry, in the same start; it is the same call, and counted once."""
    session = folded(
        OPENED,
        call("a"),
        call("b", "a", before=5, unheard=True),
        call_replayed(start=0, call_id="b"),
    )
    assert chain_ids(main_chain(session)) == ["a", "b"]
    assert session.answered_occurrences(0, "b") == {0}


def test_routed_experts_are_those_of_each_row() -> None:
    """Of a row's last token nothing is recorded."""

    def routes(num: int, first: int) -> Tensor:
        return Tensor.of(np.arange(first, first + num, dtype=np.uint8)[:, None, None])

    session = folded(
        OPENED,
        call("a", routed_experts=routes(4, 0)),
        call("c", "a", before=5, said=1, routed_experts=routes(3, 50), routed_experts_start=4),
        call("b", "a", before=5, routed_experts=routes(5, 4), routed_experts_start=4),
    )
    chain = main_chain(session)
    experts, mask = experts_of(chain)
    assert experts is not None
    assert mask is not None
    assert experts.numpy()[:, 0, 0].tolist() == [*range(9), 0, *range(4), 50, 51, 52]
    assert mask.numpy().tolist() == [1] * 9 + [0] + [1] * 7
    sample = trajectory(
        segments=segments_of(chain), routed_experts=experts, routed_experts_mask=mask
    )
    check_trajectory(sample, 200, 100)
    _, branch = rows_of_sample(sample)
    assert branch.routed_experts is not None
    assert branch.routed_experts.numpy()[:, 0, 0].tolist() == [*range(4), 50, 51, 52]
