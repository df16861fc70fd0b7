"""Agents that somebody else starts: runners ask for sessions over HTTP, and may go silent."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from rlstreams.schemas.events import OutcomeReported
from rlstreams.streams.broker.ports import free_port
from rlstreams.streams.log.topics import (
    OUTCOMES,
    TOPICS,
)
from rlstreams.workers.config.agents import AgentSection, GatewaySection
from rlstreams.workers.engines.base import GeneratedSegment, SampleRequest
from rlstreams.workers.gateway.keys import Keys
from rlstreams.workers.rollout.sessions import ConfiguredAgent
from tests.unit.roles.remote_stand import TIMEOUT_S, Session, World, post
from tests.unit.roles.sessions_stand import SECRET, Client, ScriptedAgent, recorded
from tests.unit.roles.stand import make_prompt


@pytest.fixture
def world(tmp_path: Path) -> Iterator[Callable[..., World]]:
    made: list[World] = []

    def make(**options: Any) -> World:
        made.append(World(tmp_path, **options))
        return made[-1]

    yield make
    for one in made:
        one.end()


@pytest.mark.parametrize("by_agent", [True, False])
def test_what_a_runner_did_is_one_trajectory(world, by_agent: bool) -> None:
    """The answer is told to who judges itself alone; keys are in no record."""
    run = world(by_agent=by_agent)
    session = run.take()
    task = session.given["task"]
    assert ("answer" in task, task["prompt"], task["session"]) == (by_agent, "2 + 3 =", "0/0")
    assert 200 == run.done(session.say, "1").status
    if by_agent:
        assert 200 == run.done(session.post, "outcome", {"reward": 0.25}).status
    assert 200 == run.done(session.close).status
    run.until(lambda: run.trajectories)
    (closed,), (outcome,) = (
        recorded(run.stand).closed,
        run.stand.read(OUTCOMES.name, OutcomeReported),
    )
    assert (closed.kind, closed.num_calls) == ("ended", 1)
    assert outcome.grader == ("agent" if by_agent else "length")
    assert run.trajectories[0].reward == outcome.reward > 0
    keys = [session.given["api_key"], run.told["key"]]
    bus = run.stand.bus()
    for topic in TOPICS:
        for raw in bus.reader(bus.beginnings(topic.name)).poll(10_000, 0.0):
            assert not any(key.encode() in bytes(raw.value or b"") for key in keys)


def test_a_silent_runner_loses_its_session_to_the_next_one(world) -> None:
    """Which is another start, resumed from the log; the first key says 410 from then on."""
    run = world(lease_s=0.3)
    first = run.take()
    heard = run.done(first.say, "1").body
    second = run.take()
    assert second.name == first.name
    assert second.given["api_key"] != first.given["api_key"]
    assert run.starts == [("0/0", 0), ("0/0", 1)]
    for refused in (run.done(first.say, "1"), run.done(first.post, "heartbeat")):
        assert (refused.status, refused.headers["x-should-retry"]) == (410, "false")
    again = run.done(second.say, "1").body
    assert (again["id"], again["choices"]) == (heard["id"], heard["choices"])
    run.done(second.say, "1", "10")
    run.done(second.close)
    run.until(lambda: run.trajectories)
    log = recorded(run.stand)
    assert ([call.start for call in log.calls], len(log.replays)) == ([0, 1], 1)


def test_a_heartbeat_keeps_a_session_and_so_does_a_call_under_way(world) -> None:
    run = world(lease_s=0.5)
    stage: Any = run.loop._stage
    session = run.take()
    for _ in range(4):
        run.ticks(0.25)
        assert 200 == run.done(session.post, "heartbeat").status
    sampled = stage._engine.generate

    async def slow(request: SampleRequest) -> AsyncIterator[GeneratedSegment]:
        await asyncio.sleep(1.2)
        async for segment in sampled(request):
            yield segment

    stage._engine.generate = slow
    assert 200 == run.done(session.say, "1").status
    run.done(session.close)
    run.until(lambda: run.trajectories)
    assert run.starts == [("0/0", 0)]


def test_a_session_that_no_runner_keeps_is_set_aside(world) -> None:
    """And that it was a runner, not the agent, is the reason."""
    run = world(lease_s=0.1, starts=2)
    assert [run.take().name, run.take().name] == ["0/0", "0/0"]
    run.until(lambda: run.letters)
    assert run.letters[0].reason == "infrastructure"
    assert "its runner was silent for 0.1 s (agent.lease_s)" in run.letters[0].detail


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ({"kind": "environment", "detail": "no sandbox"}, "environment"),
        ({"kind": "agent", "detail": "no sandbox"}, "agent"),
    ],
)
def test_a_runner_says_how_it_ended(world, how: dict[str, str], reason: str) -> None:
    run = world()
    session = run.take()
    run.done(session.say, "1")
    run.done(lambda: session.close(**how))
    run.until(lambda: run.letters)
    assert (run.letters[0].reason, run.letters[0].detail) == (reason, "no sandbox")


def test_an_agent_that_fails_at_its_limit_is_judged(world) -> None:
    """As one whose process ends with another status than 0."""
    run = world(max_calls=1)
    session = run.take()
    run.done(session.say, "1")
    assert 400 == run.done(session.say, "1", "10").status
    run.done(lambda: session.close(kind="agent", detail="it raised"))
    run.until(lambda: run.trajectories)
    assert recorded(run.stand).closed[0].kind == "limit"


def test_who_may_ask(world) -> None:
    """A session's key asks for nothing, a runner's key calls no model; refused before all else."""
    run = world()
    session = run.take()
    others = [
        "rlr-nothing",
        Keys("another run's").make_runner("agent"),
        Keys(SECRET).make_runner("another"),
        session.given["api_key"],
        session.given["api_key"].replace("rls-", "rlr-"),
    ]
    for key in others:
        answer = run.done(run.ask, 5.0, key)
        assert (answer.status, answer.headers["x-should-retry"]) == (401, "false")
    runners = run.told["key"]
    for key in (runners, runners.replace("rlr-", "rls-")):
        assert 401 == run.done(post, f"{session.given['base_url']}/close", key).status
    assert 200 == run.done(session.say, "1").status


def test_nothing_to_do_is_said_and_no_crowd_waits(world) -> None:
    run = world(num=0)
    nothing = run.done(run.ask, 0.2)
    assert (nothing.status, nothing.headers["retry-after"]) == (204, "1")
    for wrong in (-1.0, 61.0, float("nan")):
        assert 400 == run.done(run.ask, wrong).status
    crowd = [run.start(run.ask, 5.0) for _ in range(9)]
    run.until(lambda: any(one.done() for one in crowd))
    (refused,) = [one.result() for one in crowd if one.done()]
    assert (refused.status, refused.headers["retry-after"]) == (429, "5")
    run.issue("0", 8)
    run.until(lambda: all(one.done() for one in crowd))
    given = [one.result().body["session"] for one in crowd if one.result().status == 200]
    assert sorted(given) == [f"0/{sample}" for sample in range(8)]


def test_two_runners_never_hold_the_same_start(world) -> None:
    """Sixteen ask at once for a dozen sessions, some of which they lose again."""
    run = world(num=12, lease_s=0.3, starts=50)
    held: list[str] = []

    def works() -> None:
        while (answer := run.ask(1.0)).status != 204:
            if answer.status == 429:
                time.sleep(0.05)
                continue
            session = Session(answer.body)
            held.append(session.given["api_key"])
            if len(held) % 3:
                session.say("1")
                session.close()

    crowd = [run.start(works) for _ in range(16)]
    run.until(lambda: len(run.trajectories) == 12)
    run.until(lambda: all(one.done() for one in crowd))
    assert [one.exception() for one in crowd] == [None] * 16
    assert len(held) == len(set(held)) == len(set(run.starts)) == len(run.starts) > 12


def test_a_runner_that_hangs_up_is_given_none(world) -> None:
    run = world(num=0)
    place = urlsplit(run.told["url"])
    with socket.create_connection((place.hostname, place.port), TIMEOUT_S) as gone:
        head = f"POST /sessions HTTP/1.1\r\nhost: a\r\nauthorization: Bearer {run.told['key']}"
        gone.sendall(f"{head}\r\ncontent-length: 0\r\n\r\n".encode())
        agent: Any = run.player.sessions.members[0].agent
        run.until(lambda: agent._runners)
    run.until(lambda: not agent._runners)
    run.issue("0", 1)
    run.take()
    assert run.starts == [("0/0", 0)]


def test_the_end_of_a_worker_is_told_and_the_next_one_offers_its_sessions(world) -> None:
    """Whoever waits is told to come again; whoever works hears 410 of the next worker, whose first
    runner goes on from the log."""
    run = world(num=1)
    run.stand.config = replace(run.stand.config, gateway=GatewaySection(port=free_port()))
    run.loop.close()
    run.loop = run.worker()
    first = run.take()
    heard = run.done(first.say, "1").body
    waits = run.start(run.ask)
    agent: Any = run.player.sessions.members[0].agent
    run.until(lambda: agent._runners)
    run.loop.close()
    assert (waits.result().status, waits.result().headers["retry-after"]) == (503, "5")
    run.loop = run.worker()
    second = run.take()
    assert second.given["base_url"] == first.given["base_url"]
    assert (second.name, run.starts) == ("0/0", [("0/0", 0), ("0/0", 1)])
    assert 410 == run.done(first.say, "1").status
    assert run.done(second.say, "1").body["id"] == heard["id"]
    run.done(second.close)
    run.until(lambda: run.trajectories)
    assert len(recorded(run.stand).calls) == 1


def test_the_worker_says_whom_it_waits_for_and_others_go_on(world) -> None:
    """Sessions that no runner has take no room: those of an agent that we start are all played.
    Nor do those take theirs: a runner could have all that came, while as many run here as may."""
    run = world(num=0)

    async def speaks(client: Client) -> None:
        await client.say("1")
        while run.player.num_waiting < offered:  # noqa: ASYNC110
            await asyncio.sleep(0.01)

    sessions = run.player.sessions
    agent = ScriptedAgent(speaks)
    agent.open_sessions = sessions.open_sessions
    here = ConfiguredAgent(
        section=AgentSection(name="here", command=("none",)), agent=agent, code_hash=""
    )
    sessions.members = [*sessions.members, here]
    capacity = sessions.open_sessions.shared.engine.capacity
    of_agents = [sessions.member_of(make_prompt(str(g), 0, 1)) for g in range(6 * capacity)]
    here_at = [number for number, member in enumerate(of_agents) if member is here]
    last = 2 * capacity - 1  # of them that are taken while none is over
    offered = here_at[last] - last
    for group in range(6 * capacity):
        run.issue(str(group), 1)
    run.until(lambda: sessions.num_remote + len(run.trajectories) == 6 * capacity)
    assert sessions.num_remote > 2 * capacity
    run.until(lambda: "waiting for a runner" in run.says())
    assert f"for a runner of agent 'agent': {sessions.num_remote} sessions" in run.says()
    assert "runner.json" in run.says()
    closed = {one.session_id for one in recorded(run.stand).closed}
    assert ({name for name, _ in run.starts}, run.letters) == (closed, [])


def test_choices_whose_siblings_are_refused_are_heard_by_nobody(world) -> None:
    """Their client has one refusal for all of them: none of them is the end of the sample."""
    run = world(max_calls=3)
    session = run.take()
    said = run.done(session.say, "1").body["choices"][0]["message"]
    stage: Any = run.loop._stage
    sampled = stage._engine.generate

    async def slowly(request: SampleRequest) -> AsyncIterator[GeneratedSegment]:
        await asyncio.sleep(0.2)
        async for segment in sampled(request):
            yield segment

    stage._engine.generate = slowly
    messages = [{"role": "user", "content": "1"}, said, {"role": "user", "content": "10"}]
    answer = run.done(session.post, "chat/completions", {"messages": messages, "n": 3})
    assert (answer.status, answer.body["error"]["code"]) == (400, "limit_reached")
    run.until(lambda: len(recorded(run.stand).calls) == 3)
    run.done(session.close)
    run.until(lambda: run.trajectories)
    assert [call.unheard for call in recorded(run.stand).calls] == [False, True, True]
    assert 1 == sum(one.author == "policy" for one in run.trajectories[0].segments)
