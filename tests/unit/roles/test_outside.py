"""Clients from outside: programs with work of their own, whose sessions become samples."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlstreams.streams.broker.ports import free_port
from rlstreams.workers.config.agents import GatewaySection
from rlstreams.workers.engines.base import GeneratedSegment, SampleRequest
from tests.unit.roles.remote_stand import Answer, Session, World, post
from tests.unit.roles.sessions_stand import recorded


@pytest.fixture
def world(tmp_path: Path) -> Iterator[Callable[..., World]]:
    made: list[World] = []

    def make(**options: Any) -> World:
        made.append(World(tmp_path, outside=True, by_agent=True, **options))
        return made[-1]

    yield make
    for one in made:
        one.end()


def ask(run: World, group: str, wait_s: float = 30.0) -> Answer:
    told = run.told_to("clients.json")
    return post(f"{told['url']}?group={group}&wait_s={wait_s}", told["key"])


def take(run: World, group: str) -> Session:
    answer = run.done(ask, run, group)
    assert answer.status == 200, answer
    return Session(answer.body)


def patient(session: Session, *texts: str) -> Answer:
    """As a client does that is told to come again."""
    while (answer := session.say(*texts)).status == 503:
        time.sleep(0.05)
    return answer


def work(run: World, session: Session, reward: float) -> None:
    assert 200 == run.done(session.say, "1").status
    assert 200 == run.done(session.post, "outcome", {"reward": reward}).status
    assert 200 == run.done(session.close).status


def test_sessions_of_a_clients_group_become_samples_of_one_group(world) -> None:
    """Whatever order they come in; who has more of them than a group has places fills another."""
    run = world(num=2)
    run.issue("1", 2)
    run.issue("2", 2)
    sessions = [(group, take(run, group)) for group in ("a", "b", "a", "b", "a", "a")]
    for number, (_, session) in enumerate(sessions):
        assert "task" not in session.given
        work(run, session, number / 10)
    run.until(lambda: len(run.trajectories) == 6)
    of_group: dict[str, set[str]] = {}
    for group, session in sessions:
        of_group.setdefault(session.name.partition("/")[0], set()).add(group)
    assert [{"a"}, {"a"}, {"b"}] == sorted(of_group.values(), key=sorted)
    told = {one.session_id: one.client_group for one in recorded(run.stand).opened}
    assert told == {session.name: group for group, session in sessions}
    rewards = {f"{one.group_id}/{one.sample}": one.reward for one in run.trajectories}
    assert rewards == {session.name: n / 10 for n, (_, session) in enumerate(sessions)}


def test_who_comes_alone_is_not_waited_for_in_vain(world) -> None:
    """Its siblings' places are set aside, as nobody's fault, and never paid."""
    run = world(num=3, lease_s=0.4)
    work(run, take(run, "alone"), 1.0)
    run.until(lambda: len(run.letters) == 2)
    assert {"abandoned"} == {one.reason for one in run.letters}
    assert "no session of its group came within 0.4 s (agent.lease_s)" in run.letters[0].detail
    assert [1.0] == [one.reward for one in run.trajectories]
    run.issue("1", 1)
    assert "1/0" == take(run, "alone").name  # the group is full: the next one begins another


def test_a_client_goes_on_with_its_key_after_its_worker_died(world) -> None:
    """It is told to come again; a call whose answer it did not get is the same call; the next one
    continues it; a sibling that comes then is of the same group."""
    run = world(num=2)
    run.issue("1", 2)
    run.stand.config = replace(run.stand.config, gateway=GatewaySection(port=free_port()))
    run.loop.close()
    run.loop = run.worker()
    other = take(run, "b")
    session = take(run, "a")
    said = run.done(session.say, "1").body
    work(run, take(run, "a"), 0.5)
    run.until(lambda: run.trajectories)
    run.loop.close()
    run.loop = run.worker()
    early = run.start(session.say, "1")
    while not early.done():
        time.sleep(0.01)  # the worker has not looked into the log yet
    assert (early.result().status, early.result().headers["retry-after"]) == (503, "1")
    run.until(lambda: len([one for one in run.starts if one[1] == 1]) == 2)
    again = run.done(patient, session, "1").body
    assert (again["id"], again["choices"]) == (said["id"], said["choices"])
    messages = [
        {"role": "user", "content": "1"},
        {"role": "assistant", "content": said["choices"][0]["message"]["content"]},
        {"role": "user", "content": "2"},
    ]
    assert 200 == run.done(session.post, "chat/completions", {"messages": messages}).status
    for one in (session, other):
        run.done(one.post, "outcome", {"reward": 1.0})
    log = recorded(run.stand)
    mine = [call for call in log.calls if call.session_id == session.name]
    assert [None, mine[0].call_id] == [call.parent for call in mine]
    assert [0, 1] == [call.start for call in mine]
    assert Counter(call.call_id for call in log.calls).most_common(1)[0][1] == 1
    assert take(run, "b").name.partition("/")[0] == other.name.partition("/")[0]
    run.done(session.close)
    run.until(lambda: len(run.trajectories) == 2)
    assert 410 == run.done(session.say, "1").status


def test_a_repetition_behind_its_workers_death_is_no_answer_of_long_ago(world) -> None:
    """The last of equal requests may be a retry, once, and only if nothing went on behind it."""
    run = world(num=1)
    run.stand.config = replace(run.stand.config, gateway=GatewaySection(port=free_port()))
    run.loop.close()
    run.loop = run.worker()
    session = take(run, "a")

    def asked(*texts: str) -> dict[str, Any]:
        return dict(run.done(patient, session, *texts).body)

    ones = [asked("1")["id"] for _ in range(2)]
    tens = asked("10")
    messages = [
        {"role": "user", "content": "10"},
        tens["choices"][0]["message"],
        {"role": "user", "content": "1"},
    ]
    assert 200 == run.done(session.post, "chat/completions", {"messages": messages}).status
    run.loop.close()
    run.loop = run.worker()
    ones += [asked("1")["id"] for _ in range(3)]
    assert ones[1] == ones[2]
    assert 4 == len(set(ones))
    assert asked("10")["id"] != tens["id"]


def test_a_call_that_the_end_of_its_worker_cuts_is_the_same_call_when_it_is_sent_again(
    world,
) -> None:
    run = world(num=1)
    run.stand.config = replace(run.stand.config, gateway=GatewaySection(port=free_port()))
    run.loop.close()
    run.loop = run.worker()
    session = take(run, "a")
    stage: Any = run.loop._stage
    engines, never = [stage._engine], asyncio.Event()
    sampled = stage._engine.generate

    async def stuck(request: SampleRequest) -> AsyncIterator[GeneratedSegment]:
        async for segment in sampled(request):
            drawn.append(request.sample_id)
            await never.wait()
            yield segment

    drawn: list[str] = []
    stage._engine.generate = stuck
    cut = run.start(session.say, "1")
    run.until(lambda: drawn)
    run.loop.close()
    assert (cut.result().status, cut.result().headers["retry-after"]) == (503, "5")
    run.loop = run.worker()
    run.until(lambda: (session.name, 1) in run.starts)
    stage = run.loop._stage
    engines.append(stage._engine)
    assert 200 == run.done(patient, session, "1").status
    assert drawn == [one.sample_id for one in engines[1].requests]
    assert 1 == len(recorded(run.stand).calls)


def test_a_session_that_nobody_ends_is_set_aside(world) -> None:
    run = world(num=1, lease_s=0.4)
    session = take(run, "a")
    assert 200 == run.done(session.say, "1").status
    run.until(lambda: run.letters)
    assert ("abandoned", 1) == (run.letters[0].reason, recorded(run.stand).closed[0].num_calls)
    assert "its client was silent for 0.4 s (agent.lease_s)" in run.letters[0].detail
    assert 410 == run.done(session.say, "1").status


def test_a_client_that_is_silent_behind_its_reward_is_done(world) -> None:
    """Its close was answered, and its worker died before that was in the log: nobody says it again.
    One that called once more behind its reward was not done."""
    run = world(num=2, lease_s=0.5)
    done, at_work = take(run, "a"), take(run, "a")
    for session in (done, at_work):
        run.done(session.say, "1")
        run.done(session.post, "outcome", {"reward": 0.5})
    run.done(at_work.say, "2")
    run.until(lambda: run.letters and run.trajectories)
    assert [done.name] == [f"{one.group_id}/{one.sample}" for one in run.trajectories]
    assert ["abandoned"] == [one.reason for one in run.letters]
    kinds = {one.session_id: one.kind for one in recorded(run.stand).closed}
    assert {done.name: "ended", at_work.name: "abandoned"} == kinds


def test_what_cannot_be_asked_for(world) -> None:
    run = world(num=1)
    for group in ("", "x" * 201):
        refused = run.done(ask, run, group)
        assert (refused.status, refused.body["error"]["param"]) == (400, "group")
    take(run, "a")
    assert 204 == run.done(ask, run, "b", 0.2).status  # the run issued no place for it
    assert "for clients of agent" not in run.says()
