"""A session's main chain, and its tokens, experts and share as one sample."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlstreams.schemas.events import NO_VERSION, Segment, Tensor
from rlstreams.streams.sessions.chain import (
    Chain,
    NoChainError,
    experts_of,
    is_learnt_from,
    main_chain,
    segments_of,
    undelivered_share,
)
from rlstreams.workers.loop.validation import check_trajectory
from tests.call_events import answered, call_committed, call_replayed, session_opened
from tests.factories import trajectory
from tests.random_sessions import PLAIN, TOOLS, ids, played
from tests.unit.sessions.test_fold import call, folded

seeds = st.integers(0, 2**32)


def chain_ids(chain: Chain) -> list[str]:
    return [c.call_id for c in chain.calls]


def flat(segments: tuple[Segment, ...]) -> list[int]:
    return [token for segment in segments for token in segment.token_ids.numpy().tolist()]


@settings(max_examples=150, deadline=None)
@given(seeds)
def test_segments_are_the_path_and_make_a_sample(seed: int) -> None:
    """Every token of the path up to the last that is learnt from, in order, and the policy's are
    just those of the calls that are."""
    log = played(seed)
    session = folded(*log.calls)
    for terminal in (None, *log.saw):
        try:
            chain = main_chain(session, terminal)
        except NoChainError:
            path = [] if terminal is None else session.nodes[terminal].path
            assert not any(is_learnt_from(node.call) for node in path)
            continue
        segments = segments_of(chain)
        assert flat(segments) == log.saw[chain_ids(chain)[-1]][: len(flat(segments))]
        policy = [s for s in segments if s.author == "policy"]
        learnt = [s for c in chain.calls if is_learnt_from(c) for s in c.segments]
        assert [s for s in policy if len(s.token_ids)] == [s for s in learnt if len(s.token_ids)]
        assert sum(len(s.token_ids) for s in policy) == chain.trained_tokens
        if chain.trained_tokens:
            assert len(segments[-1].token_ids)
            assert segments[-1].author == "policy"
            check_trajectory(trajectory(segments=segments, routed_experts=None), 200, 10_000)
        authors = [s.author for s in segments]
        assert authors[0] == "prompt"
        assert ("environment", "environment") not in itertools.pairwise(authors)


@settings(max_examples=100, deadline=None)
@given(seeds)
def test_the_main_chain_is_the_deepest_below_the_first_root_with_tools(seed: int) -> None:
    """Against a plain search over the parents, of what the newest start was answered with."""
    log = played(seed)
    paths: dict[str, list[str]] = {}
    for name, parent in log.parent.items():
        paths[name] = [*(paths[parent] if parent else []), name]
    trained = {c.call_id for c in log.committed if c.is_trained}
    paths = {name: path for name, path in paths.items() if name in log.answers}
    paths = {name: path for name, path in paths.items() if name in trained} or paths
    with_tools = {c.call_id for c in log.committed if c.request == TOOLS and c.call_id in paths}
    roots = [name for name in log.parent if name in {path[0] for path in paths.values()}]
    fitting = [r for r in roots if any(paths[n][0] == r for n in with_tools)] or [
        next(iter(paths.values()))[0]
    ]
    tree = [name for name in paths if paths[name][0] == fitting[0]]
    deepest = max(len(paths[name]) for name in tree)
    leaves = [name for name in tree if len(paths[name]) == deepest]
    if not any(is_learnt_from(c) for c in log.committed if c.call_id in paths[leaves[-1]]):
        with pytest.raises(NoChainError, match="none of the"):
            main_chain(folded(*log.calls))
        return
    chain = main_chain(folded(*log.calls))
    assert (chain_ids(chain), list(chain.ties)) == (paths[leaves[-1]], leaves[:-1])


def test_what_a_lost_start_did_alone_is_not_the_sample() -> None:
    """The agent began anew, and another tool's answer led it elsewhere: it is judged for that. A
    client from outside does not begin anew; a start that did nothing leaves what there is."""
    before = [call("a"), call("b", "a", before=5), call("c", "b", before=10)]
    again = [session_opened(start=1), call_replayed(start=1, call_id="a")]
    other = call("other", "a", before=5, start=1)
    forked = folded(session_opened(), *before, *again, other)
    assert chain_ids(main_chain(forked)) == ["a", "other"]
    assert main_chain(forked).ties == ()
    assert chain_ids(main_chain(forked, "c")) == ["a", "b", "c"]  # somebody names it
    outside = folded(session_opened(client_group="g"), *before, session_opened(start=1), other)
    assert chain_ids(main_chain(outside)) == ["a", "b", "c"]
    silent = folded(session_opened(), *before, session_opened(start=1))
    assert chain_ids(main_chain(silent)) == ["a", "b", "c"]


def test_titles_beside_an_agent_with_tools_are_not_its_work() -> None:
    """Sub-agents and titles have roots of their own; a long one without tools is not the chain."""
    session = folded(
        call("title", request=PLAIN), call("more", "title", before=5, request=PLAIN),
        call("work", request=TOOLS),
    )  # fmt: skip
    assert chain_ids(main_chain(session)) == ["work"]
    untold = folded(call("title", request=b"no zstd"), call("work", request=b""))
    assert chain_ids(main_chain(untold)) == ["title"]


def test_auxiliary_calls_are_neither_the_sample_nor_its_end() -> None:
    """A title comes first, and no tools tell it from work; a summary goes on behind the last
    answer, which is the one to judge. What goes on behind a summary is work, and has read it."""
    calls = [call("title", is_trained=False), call("a"), call("b", "a", before=5)]
    summary = call("summary", "b", before=10, is_trained=False)
    assert chain_ids(main_chain(folded(*calls, summary))) == ["a", "b"]
    behind = main_chain(folded(*calls, summary, call("c", "summary", before=15)))
    assert chain_ids(behind) == ["a", "b", "summary", "c"]
    assert behind.trained_tokens == 9
    for terminal in (None, "title"):
        with pytest.raises(NoChainError, match="none of the 1 calls up to call title is learnt"):
            main_chain(folded(calls[0]), terminal)


def test_an_abandoned_retry_is_not_credited() -> None:
    """A sibling that went on is deeper; of last ones the agent may name the one that it kept, and
    where it does not the chain says that it had to choose."""
    went_on = folded(
        call("a"), call("kept", "a", before=5), call("retry", "a", before=5),
        call("b", "kept", before=10),
    )  # fmt: skip
    assert chain_ids(main_chain(went_on)) == ["a", "kept", "b"]
    last = folded(call("a"), call("kept", "a", before=5), call("retry", "a", before=5))
    assert chain_ids(main_chain(last, "kept")) == ["a", "kept"]
    assert main_chain(last, "kept").ties == ()
    assert (chain_ids(main_chain(last)), main_chain(last).ties) == (["a", "retry"], ("kept",))
    assert undelivered_share(last, main_chain(last, "kept")) == pytest.approx(1 / 3)


@pytest.mark.parametrize(
    ("events", "terminal", "message"),
    [
        ((), None, "session 7/1 has no call$"),
        ((call("a"),), "z", "session 7/1 has no call z"),
        ((call("a", before=4),), "a", "call a: a root of 6 prompt tokens has 2 of them"),
        ((call("a", before=4),), None, "call a: a root of 6 prompt tokens has 2 of them"),
    ],
)
def test_a_session_without_a_chain_says_why(events: Any, terminal: Any, message: str) -> None:
    with pytest.raises(NoChainError, match=message):
        main_chain(folded(session_opened(), *events), terminal)


def test_a_broken_link_is_passed_by() -> None:
    """What hangs below it is deeper, and nobody knows its prompt."""
    session = folded(call("a"), call("b", "a", before=9), call("c", "b", before=14), call("d"))
    assert chain_ids(main_chain(session)) == ["a"]


def test_calls_that_are_not_learnt_from_have_no_version() -> None:
    session = folded(
        call("a", said=2, is_trained=False), call("b", "a", before=4, constrained="grammar"),
        call("c", "b", before=9), call("d", "c", before=14, is_trained=False),
    )  # fmt: skip
    segments = segments_of(main_chain(session))
    assert [(s.author, len(s.token_ids)) for s in segments] == [
        ("prompt", 2), ("environment", 2 + 2 + 3 + 2), ("policy", 3),
    ]  # fmt: skip
    assert segments[1].policy_version == NO_VERSION
    assert segments[1].behavior_logprobs is None


def test_share_that_is_not_delivered() -> None:
    session = folded(call("a"), call("b", "a", before=5, is_trained=False), call("c"))
    assert undelivered_share(session, main_chain(session)) == pytest.approx(2 / 3)
    assert undelivered_share(session, None) == 1.0
    assert undelivered_share(folded(call("a", said=0)), None) == 0.0


def rows(*values: int) -> Tensor:
    return Tensor.of(np.array(values, np.uint8).reshape(-1, 1, 1))


def routed(name: str, parent: str | None, before: int, versions: list[int], **more: Any) -> Any:
    """Two new tokens and two sampled by each version."""
    return call_committed(
        call_id=name, parent=parent, prompt_tokens=before + 2, new_ids=ids([1, 2]),
        segments=tuple(answered(2, version) for version in versions), **more,
    )  # fmt: skip


def test_experts_are_those_of_the_version_that_passed_a_token_first() -> None:
    """Weights change between two calls: rows of the prefix under new ones are not taken, the last
    token of a turn and the new ids come with the next call."""
    first = routed("a", None, 0, [1], routed_experts=rows(10, 11, 12))
    second = routed("b", "a", 4, [1, 2], routed_experts=rows(90, 91, 92, 93, 20, 21, 22, 23, 24))
    experts, mask = experts_of(main_chain(folded(first, second)))
    assert experts is not None
    assert (experts.numpy().ravel().tolist(), mask) == ([10, 11, 12, 93, 20, 21, 22, 23, 24], None)

    late = routed("b", "a", 4, [2], routed_experts=rows(20, 21), routed_experts_start=5)
    experts, mask = experts_of(main_chain(folded(first, late)))
    assert experts is not None
    assert mask is not None
    assert mask.numpy().tolist() == [1, 1, 1, 0, 0, 1, 1]
    assert experts.numpy().ravel().tolist() == [10, 11, 12, 0, 0, 20, 21]


def test_experts_of_a_sample_without_its_last_calls() -> None:
    """Their rows are left out with their tokens."""
    first = routed("a", None, 0, [1], routed_experts=rows(10, 11, 12))
    second = routed("b", "a", 4, [1], is_trained=False, routed_experts=rows(*range(7)))
    experts, mask = experts_of(main_chain(folded(first, second)))
    assert (experts, mask) == (Tensor.of(rows(10, 11, 12).numpy(), "zstd"), None)
    assert experts_of(main_chain(folded(call("a")))) == (None, None)


def test_experts_outside_of_a_call_are_named() -> None:
    wide = routed("a", None, 0, [1], routed_experts=rows(1, 2, 3, 4))
    with pytest.raises(ValueError, match="routed_experts of call a have 1 rows behind the token"):
        experts_of(main_chain(folded(wide)))
