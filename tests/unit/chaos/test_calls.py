"""What a run of agents is held against: each promise that a log or a note breaks is counted."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import zstandard

from rlstreams.schemas.events import CallCommitted, Event, OutcomeReported, Segment, Tensor
from rlstreams.streams.log.codec import outgoing
from rlstreams.streams.log.topics import TOPICS
from rlstreams.streams.run.run_log import BusLog
from tests import factories
from tests.call_events import (
    NOW_MS,
    answered,
    call_committed,
    call_replayed,
    outcome_reported,
    session_closed,
    session_opened,
)
from tests.chaos.calls import Note, accounted, compared
from tests.logs import made_log
from tests.memory.bus import MemoryBus

OWN = "7/1"
Log = list[Event]
Notes = list[Note]


def call(name: str, turn: int, start: int) -> CallCommitted:
    """The first call of a session, or the second."""
    response = zstandard.compress(json.dumps({"content": f"said {turn}"}).encode())
    return call_committed(
        call_id=name,
        request_hash=f"h{turn}",
        start=start,
        parent="c0" if turn else None,
        prompt_tokens=13 if turn else 5,
        response=response,
    )


def sound() -> tuple[Log, Notes]:
    """An agent is killed while it waits for its second answer, and begins anew."""
    log: Log = [
        session_opened(at_ms=NOW_MS),
        call("c0", 0, 0),
        session_opened(start=1, at_ms=NOW_MS + 1000),
        call_replayed(call_id="c0"),
        call("c1", 1, 1),
        session_closed(start=1, num_calls=2),
        outcome_reported(grader="agent"),
        factories.trajectory(group_id="7", sample=1),
    ]
    notes = [
        Note("asks", OWN, 0, NOW_MS + 10, "", ""),
        Note("heard", OWN, 0, NOW_MS + 20, "c0", "said 0"),
        Note("asks", OWN, 1, NOW_MS + 30, "", ""),
        Note("asks", OWN, 0, NOW_MS + 1010, "", ""),
        Note("heard", OWN, 0, NOW_MS + 1020, "c0", "said 0"),
        Note("asks", OWN, 1, NOW_MS + 1030, "", ""),
        Note("heard", OWN, 1, NOW_MS + 1040, "c1", "said 1"),
    ]
    return log, notes


def opened(events: Log) -> BusLog:
    """A run with this log."""
    bus = MemoryBus(made_log(), "run")
    topics = {kind: topic for topic in TOPICS for kind in topic.events}
    with bus.producer("test") as producer:
        producer.commit([outgoing(topics[type(event)], event) for event in events])
    return BusLog(bus, "run")


def test_a_sound_log_breaks_nothing_and_its_kill_is_counted() -> None:
    """One turn was asked for in vain: that under way at the kill. A request that no gateway took
    is none."""
    events, notes = sound()
    log = opened(events)
    found = accounted(log, log.sessions(), notes)
    assert {0} == set(found["broken"].values()), found["broken"]
    assert (1, 4, 2) == (found["asked_in_a_start_that_was_lost"], found["asked"], found["calls"])
    refused = [*notes, Note("asks", OWN, 2, NOW_MS, "", ""), Note("unsent", OWN, 2, NOW_MS, "", "")]
    assert found == accounted(log, log.sessions(), refused)


def _copied(kind: type[Event]) -> Callable[[Log, Notes], None]:
    def copy(log: Log, notes: Notes) -> None:
        log.append(next(event for event in log if isinstance(event, kind)))

    return copy


def _lost(log: Log, notes: Notes) -> None:
    notes.append(Note("heard", OWN, 2, NOW_MS + 1060, "c9", "said 9"))
    notes.insert(-1, Note("asks", OWN, 2, NOW_MS + 1050, "", ""))


def _reworded(log: Log, notes: Notes) -> None:
    notes[4] = notes[4]._replace(text="another")


def _twice_in_vain(log: Log, notes: Notes) -> None:
    notes.insert(3, Note("asks", OWN, 2, NOW_MS + 40, "", ""))


def _forked(log: Log, notes: Notes) -> None:
    log[4] = replace(call("c1", 1, 1), parent=None, prompt_tokens=5)


def _revised(log: Log, notes: Notes) -> None:
    log.append(outcome_reported(outcome_id="o2", grader="agent", reward=0.5))


def _unjudged(log: Log, notes: Notes) -> None:
    log[:] = [event for event in log if not isinstance(event, OutcomeReported)]


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (_lost, {"heard and not in the log"}),
        (_copied(CallCommitted), {"call recorded twice"}),
        (_copied(OutcomeReported), {"outcome recorded twice"}),
        (_reworded, {"call heard with two texts", "heard with other words than recorded"}),
        (_twice_in_vain, {"two turns sampled again by one lost start"}),
        (_forked, {"call that continues none, behind the first"}),
        (_revised, {"session judged more or less than once"}),
        (_unjudged, {"session judged more or less than once"}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_broken_promise_is_counted(damage: Callable[[Log, Notes], None], told: set[str]) -> None:
    """Under its own name, and under no other."""
    events, notes = sound()
    damage(events, notes)
    log = opened(events)
    broken = accounted(log, log.sessions(), notes)["broken"]
    assert told == {name for name, num in broken.items() if num}


def test_calls_of_two_runs_are_compared_where_their_weights_are_the_same() -> None:
    """One token less, or another, is a difference; of other weights it is none."""
    first = opened([session_opened(), call("c0", 0, 0)]).sessions()
    told: list[float] = []

    def other(segment: Segment) -> list[str]:
        event = replace(call("c0", 0, 0), segments=(segment,))
        found = compared(first, opened([session_opened(), event]).sessions())
        told.append(found["largest_logprob_difference"])
        assert 1 == found["calls_of_both"]
        return list(found["differ"])

    assert [] == other(answered(3))
    assert ["c0"] == other(answered(2))
    assert ["c0"] == other(answered(3, start=101))
    likelier = Tensor.of(np.full(3, -0.25, np.float32))
    assert [] == other(replace(answered(3), behavior_logprobs=likelier))
    assert [] == other(replace(answered(2), weight_hash="b2" * 32))
    assert [0, 0, 0, 0.25, 0] == told
