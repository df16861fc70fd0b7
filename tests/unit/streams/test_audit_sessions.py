"""Sessions of agents in the audit: a healthy run is clean, and each fault is found."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlstreams.schemas.events import CallCommitted, CallFailed, Event, Segment, Trajectory
from rlstreams.streams.audit.report import Breaches, BreachKind, CountedNames
from rlstreams.streams.audit.sessions import SessionsAudit
from rlstreams.streams.log.record import Partition, Position
from rlstreams.streams.sessions.chain import NoChainError, main_chain, segments_of
from tests.call_events import (
    answered,
    call_committed,
    call_failed,
    call_replayed,
    outcome_reported,
    session_closed,
    session_opened,
)
from tests.factories import dead_letter, policy_loaded, trajectory
from tests.random_sessions import ids, played
from tests.unit.sessions.test_fold import folded
from tests.unit.streams.audit_log import Log, healthy, kinds

NAME = "6/0"
SESSION = {"session_id": NAME, "group_id": "6"}
Break = Callable[[Log], object]
BREACHES: list[tuple[Break, Mapping[str, int], str]] = []


def call(call_id: str, **changes: Any) -> CallCommitted:
    return call_committed(
        call_id=call_id, request_hash=call_id, segments=(answered(3, version=0),),
        **{**SESSION, **changes},
    )  # fmt: skip


def opened(log: Log, *more: Event, kind: str = "ended", rewards: int = 1) -> list[Event]:
    """Session 6/0: two calls by two starts, of which the second continues the first."""
    log.rollout_done.update(log.issue("6"))
    events: list[Event] = [
        session_opened(**SESSION), call("a"), call_failed(**SESSION),
        session_opened(start=1, **SESSION), call_replayed(start=1, call_id="a", **SESSION),
        call("b", start=1, parent="a", prompt_tokens=10, new_ids=ids([7, 8])),
        session_closed(kind=kind, **SESSION), *more,
    ]  # fmt: skip
    for event in events:
        log.add("calls", event)
    for number in range(rewards):
        log.add("outcomes", outcome_reported(outcome_id=f"o{number}", **SESSION))
    return events


def sample_of(events: list[Event], terminal: str | None = None) -> Trajectory:
    segments = segments_of(main_chain(folded(*events), terminal))
    return trajectory(group_id="6", sample=0, segments=segments, routed_experts=None)


def delivered(*more: Event, terminal: str | None = None) -> Log:
    """A healthy run with one session whose sample is there, and one sample without a session."""
    log = healthy()
    events = opened(log, *more)
    log.add("trajectories", sample_of(events[:7], terminal))
    log.add("trajectories", trajectory(group_id="6", sample=1, segments=sample_of(events).segments))
    return log


def change(log: Log, kind: type[Event], **changes: Any) -> None:
    calls = log.topics["calls"]
    place = next(n for n, event in enumerate(calls) if isinstance(event, kind))
    calls[place] = replace(calls[place], **changes)


@pytest.mark.parametrize("terminal", [None, "a", "b"])
def test_a_session_is_accounted_for(terminal: str | None) -> None:
    """Whichever of its calls was judged; a session of its own group stays without a breach."""
    report = delivered(terminal=terminal).report()
    assert (report.ok, report.sessions, report.calls, report.replayed) == (
        True, {"ended": 1}, 2, 1,
    )  # fmt: skip
    assert "sessions                   1  ended 1" in report.text()
    assert "calls                    2  and 1 answered from the log" in report.text()
    assert json.loads(report.to_json())["sessions"] == {"ended": 1}


def test_a_session_that_went_to_another_worker_names_loads_of_both() -> None:
    """Its sample is written by the last of them; a load of nobody is a breach."""
    log = healthy()
    events = opened(log)
    moved = sample_of(events)
    given, said, *rest = moved.segments
    said = replace(said, load_id="rollout-1/x/1")
    log.add("trajectories", replace(moved, segments=(given, said, *rest)))
    assert "unknown load" in kinds(log.report())
    log.add("policy-pulls", replace(policy_loaded(0), worker="rollout-1", load_id="rollout-1/x/1"))
    assert "unknown load" not in kinds(log.report())


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32))
def test_every_path_of_a_session_may_be_its_sample(seed: int) -> None:
    """As the fold makes it, of whatever tree; and one more token behind it may not."""
    log = played(seed)
    session = folded(*log.calls)
    for terminal in (None, *log.saw):
        try:
            chain = main_chain(session, terminal)
        except NoChainError as err:
            if "all are auxiliary or constrained" not in str(err):
                raise
            continue
        segments = segments_of(chain)
        forged = (*segments, Segment(author="environment", token_ids=ids([1])))
        for told, expected in ((segments, {}), (forged, {"forged sample": 1})):
            breaches = Breaches()
            audit = SessionsAudit(breaches, CountedNames(), {})
            closed = () if session.is_closed else (session_closed(),)
            for offset, event in enumerate((*log.calls, *closed)):
                assert audit.take(event, Position("calls", 0, offset)) or isinstance(
                    event, CallFailed
                )
            audit.trajectory("7/1", trajectory(segments=told), Position("trajectories", 0, 0))
            audit.check(breaches, [])
            assert breaches.counts == expected


def test_copies_are_no_breach() -> None:
    """Of calls, starts, closes and outcomes, byte for byte."""
    log = delivered()
    for topic in ("calls", "outcomes"):
        log.topics[topic] += log.topics[topic]
    report = log.report()
    assert (report.ok, report.sessions, report.calls, report.replayed) == (
        True, {"ended": 1}, 2, 1,
    )  # fmt: skip
    assert "6/0 again at outcomes[0]@1" in report.named_duplicates
    assert report.duplicates == 7  # starts, calls, the replay, the close, the outcome


def test_what_a_worker_writes_that_lost_its_session_is_no_breach() -> None:
    """Behind the opening of the next start, also behind the end; it counts for nothing."""
    lost = [call("c"), call_replayed(start=0, call_id="b", **SESSION)]
    report = delivered(*lost).report()
    assert (report.ok, report.calls, report.replayed, report.duplicates) == (True, 2, 1, 2)
    assert any("of start 0, which is over" in name for name in report.named_duplicates)
    assert folded(*opened(healthy(), *lost)).num_void == len(lost)


def test_failures_are_told_by_kind_and_are_no_breach() -> None:
    log = healthy()
    opened(log, kind="infrastructure", rewards=0)
    for sample in range(2):
        log.add("dead-letters", dead_letter(group_id="6", sample=sample, reason="infrastructure"))
    report = log.report()
    assert (report.ok, report.sessions, report.dead_lettered) == (True, {"infrastructure": 1}, 2)


def test_what_retention_took_is_no_breach() -> None:
    """The first records of a session are gone: its links and its sample cannot be checked."""
    log = delivered()
    change(log, CallCommitted, prompt_tokens=400)
    log.hidden = {("calls", 0)}
    log.expired = {Partition("calls", 0): 1}
    assert kinds(log.report()) == {}


def breach(says: str, /, **counts: int) -> Callable[[Break], Break]:
    def add(break_it: Break) -> Break:
        BREACHES.append((break_it, {k.replace("_", " "): n for k, n in counts.items()}, says))
        return break_it

    return add


@breach("call z at calls[0]@7, and no start of its agent before it", unopened_call=1)
def _(log: Log) -> None:
    log.add("calls", call("z", session_id="9/0", group_id="9"))


@breach("CallCommitted at calls[0]@7, closed at calls[0]@6", late_call=1)
def _(log: Log) -> None:
    log.add("calls", call("z", start=1))


@breach("calls[0]@7 has another content than the first of a", call_twice=1)
def _(log: Log) -> None:
    log.add("calls", call("a", start=1, finish_reason="length"))


@breach(
    "its prompt has 11 tokens, 2 are new, its parent a ends at 8", broken_call=1, forged_sample=1
)
def _(log: Log) -> None:
    place = next(n for n, e in enumerate(log.topics["calls"]) if getattr(e, "parent", None))
    log.topics["calls"][place] = replace(log.topics["calls"][place], prompt_tokens=11)


@breach("is no path of its calls", forged_sample=1)
def _(log: Log) -> None:
    """One token of an answer is another one."""
    found = next(n for n, e in enumerate(log.topics["trajectories"]) if e.group_id == "6")
    event = log.topics["trajectories"][found]
    assert isinstance(event, Trajectory)
    segments = list(event.segments)
    changed = segments[1].token_ids.numpy().copy()
    changed[0] += 1
    segments[1] = replace(segments[1], token_ids=ids(changed.tolist()))
    log.topics["trajectories"][found] = replace(event, segments=tuple(segments))


@breach("is of a session that is not closed", forged_sample=1)
def _(log: Log) -> None:
    log.hidden.add(("calls", 6))


@breach("judged, and no sample or dead letter", undelivered_session=1, lost=1)
def _(log: Log) -> None:
    found = next(n for n, e in enumerate(log.topics["trajectories"]) if e.group_id == "6")
    log.hidden.add(("trajectories", found))


@pytest.mark.parametrize(("break_it", "expected", "says"), BREACHES)
def test_a_breach_is_named(break_it: Break, expected: Mapping[str, int], says: str) -> None:
    log = delivered()
    break_it(log)
    report = log.report()
    assert (kinds(report), report.ok) == (expected, False)
    assert any(says in one.detail for one in report.breaches), report.breaches
    assert {one.kind for one in report.breaches} <= set(BreachKind)
