"""Figures of agents: how sessions end, what their calls cost, what came from the log."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlstreams.schemas.events import Event
from rlstreams.show.metrics.figures import NONE, of_agents
from rlstreams.show.metrics.prometheus import families
from rlstreams.streams.views.agents import AgentState, AgentsView
from rlstreams.streams.views.feed import Views
from tests.call_events import NOW_MS, call_replayed, session_closed, session_opened
from tests.random_sessions import interleaved, played
from tests.unit.sessions.test_fold import call, folded


def session(number: int, agent: str, *took_s: float, kind: str = "ended") -> list[Event]:
    """A chain of calls that took so long; the agent was killed behind the first."""
    of = {"session_id": f"7/{number}", "group_id": "7"}
    calls: list[Event] = []
    for n, seconds in enumerate(took_s):
        parent = f"c{n - 1}" if n else None
        at_ms = NOW_MS + 10_000 * n
        calls.append(
            call(f"c{n}", parent, before=5 * n, start=int(n > 0), received_at_ms=at_ms,
                 finished_at_ms=at_ms + round(1000 * seconds), **of)
        )  # fmt: skip
    opened = session_opened(sample=number, agent=agent, **of)
    again = session_opened(sample=number, agent=agent, start=1, **of)
    replayed = call_replayed(start=1, call_id="c0", **of)
    first, *rest = calls
    return [opened, first, again, replayed, *rest, session_closed(sample=number, kind=kind, **of)]


def views_of(*events: Event) -> Views:
    views = Views()
    for event in events:
        views.apply(event)
    return views


def test_each_agent_has_its_own_figures() -> None:
    title = call("t", start=1, session_id="7/1", group_id="7", said=6, why_root="another dialogue")
    first = session(1, "solver", 1.0, 2.0, 3.0)
    state = views_of(
        *first[:-1], title, first[-1],
        *session(2, "solver", 4.0, kind="agent"), *session(2, "solver", 9.0),  # copies
        *session(3, "critic", 0.5)[:-1],
    ).state  # fmt: skip
    found = {
        agent: {key: figure.value for key, figure in figures.items()}
        for agent, figures in of_agents(state).items()
    }
    assert found["solver"] == {
        "sessions": "1 ended, 1 agent",
        "calls": "2.5",
        "latency_p50": "2",
        "latency_p95": "4",
        "replayed": "28.6",  # two of seven
        "beside": "33.3",  # six of eighteen
    }
    assert found["critic"] == {
        "sessions": "1 open",
        **dict.fromkeys(list(found["solver"])[1:], NONE),
    }
    scraped = {family.name: family.values for family in families(state)}
    assert scraped["agent_sessions"] == {("solver", "ended"): 1, ("solver", "agent"): 1}
    assert scraped["agent_figure"]["solver", "beside"] == pytest.approx(100 / 3)


def test_a_session_that_closed_in_a_way_of_a_newer_release_is_counted() -> None:
    state = views_of(*session(1, "solver", 1.0), *session(2, "solver", 1.0, kind="merged")).state
    assert of_agents(state)["solver"]["sessions"].value == "1 ended, 1 merged"


def test_a_run_without_agents_has_none() -> None:
    assert of_agents(Views().state) == {}


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32))
def test_it_counts_as_the_fold_does_whatever_is_interleaved(seed: int) -> None:
    log = played(seed)
    view = AgentsView()
    for event in interleaved(log, random.Random(seed)):
        view.apply(event)
    whole = folded(*log.calls, *log.outcomes)
    (state,) = view.state
    assert isinstance(state, AgentState)
    if whole.is_closed:
        assert (state.num_calls, state.num_replays) == (len(whole.calls), len(whole.replays))
        assert (state.num_sessions, state.num_open) == (1, 0)
    else:
        assert (state.num_sessions, state.num_open) == (0, 1)
