"""Sessions in the rollout role: what is logged of an agent's work, and how its end is judged."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlstreams.schemas.events import (
    CallFailed,
    DeadLetter,
    OutcomeReported,
    PolicyLoaded,
    Trajectory,
)
from rlstreams.streams.log.record import Outgoing
from rlstreams.streams.log.topics import CALLS, DEAD_LETTERS, OUTCOMES, POLICY_PULLS, TRAJECTORIES
from rlstreams.streams.sessions.session import sampled_tokens
from rlstreams.workers.agents.agent import Ending, LostAgentError
from rlstreams.workers.gateway.port import CallAnswer, CallRefusedError, Report
from rlstreams.workers.loop.validation import check_trajectory
from tests.unit.roles.sessions_stand import Client, Script, ScriptedAgent, recorded, worker_of
from tests.unit.roles.stand import Stand, make_prompt, tick_until
from tests.unit.roles.test_turns import EndsTurns


class Ended:
    """A worker that has played one sample to its end."""

    def __init__(
        self, folder: Path, script: Script, num: int = 1, engine: Any = None, **of_worker: Any
    ) -> None:
        self.engine = engine or EndsTurns()
        self.stand, self.agent = Stand(folder), ScriptedAgent(script)
        self.stand.publish(0)
        self.stand.issue("0", num)
        self.loop = worker_of(self.stand, self.engine, self.agent, **of_worker)
        tick_until(self.loop, lambda: len(self.trajectories) + len(self.letters) == num)
        self.loop.close()

    @property
    def trajectories(self) -> list[Trajectory]:
        return self.stand.read(TRAJECTORIES.name, Trajectory)

    @property
    def letters(self) -> list[DeadLetter]:
        return self.stand.read(DEAD_LETTERS.name, DeadLetter)

    @property
    def outcomes(self) -> list[OutcomeReported]:
        return self.stand.read(OUTCOMES.name, OutcomeReported)


async def three_turns(client: Client) -> None:
    for text in ("1", "10", "101"):
        await client.say(text)


def test_what_an_agent_did_is_one_trajectory(tmp_path: Path) -> None:
    """Each call continues the one before by its ids; the verifier judges the last answer."""
    ended = Ended(tmp_path, three_turns)
    (trajectory,), log = ended.trajectories, recorded(ended.stand)
    check_trajectory(trajectory, ended.engine.vocab_size, ended.engine.max_tokens)
    authors = [segment.author for segment in trajectory.segments]
    assert authors == ["prompt", "policy", *["environment", "policy"] * 2]
    assert [call.parent for call in log.calls] == [None, *(c.call_id for c in log.calls[:2])]
    assert [call.ordinal for call in log.calls] == [0, 1, 2]
    whole = np.concatenate([s.token_ids.numpy() for s in trajectory.segments])
    last = ended.engine.requests[-1]
    assert last.token_ids.tolist() == whole[: len(last.token_ids)].tolist()
    (closed,), (outcome,) = log.closed, ended.outcomes
    assert (closed.kind, closed.num_calls) == ("ended", 3)
    assert (outcome.grader, outcome.reward) == ("length", trajectory.reward)
    assert trajectory.reward > 0
    assert [o.start for o in log.opened] == [0]


def test_no_call_names_a_load_that_nobody_can_read_of(tmp_path: Path) -> None:
    ended = Ended(tmp_path, three_turns)
    loads = {one.load_id for one in ended.stand.read(POLICY_PULLS.name, PolicyLoaded)}
    named = {s.load_id for call in recorded(ended.stand).calls for s in call.segments}
    assert named
    assert named <= loads


def test_equal_requests_are_calls_of_their_own_one_after_another(tmp_path: Path) -> None:
    """The n-th of a kind is another call than the one before, and draws other tokens."""
    answers = []

    async def twice(client: Client) -> None:
        client.messages = [{"role": "user", "content": "1"}]
        answers.extend([await client.call(), await client.call(), await client.call(retry=1)])

    ended = Ended(tmp_path, twice)
    calls = recorded(ended.stand).calls
    assert [call.occurrence for call in calls] == [0, 1]
    assert answers[0].call_id != answers[1].call_id
    assert answers[1].call_id == answers[2].call_id  # marked by its client as another try
    assert answers[1].parsed == answers[2].parsed
    assert len({request.sample_id for request in ended.engine.requests}) == 2


def test_first_tries_side_by_side_are_calls_of_their_own(tmp_path: Path) -> None:
    """Their client would mark another try, so it wants several answers: also in a start anew."""
    heard: list[list[CallAnswer]] = []

    async def together(client: Client) -> None:
        client.messages = [{"role": "user", "content": "1"}]
        heard.append(await asyncio.gather(*(client.call(retry=0) for _ in range(3))))
        again = await client.call(retry=1)
        assert again.call_id == heard[-1][2].call_id
        if len(heard) == 1:
            raise LostAgentError("its process ended")

    log = recorded(Ended(tmp_path, together).stand)
    assert [call.occurrence for call in log.calls] == [0, 1, 2]
    assert len(log.replays) == 3
    assert [[a.call_id for a in one] for one in heard] == [[c.call_id for c in log.calls]] * 2


def test_equal_requests_side_by_side_are_one_call(tmp_path: Path) -> None:
    """Where nobody says which try it is: a client may have given up the first."""
    answers = []

    async def together(client: Client) -> None:
        client.messages = [{"role": "user", "content": "1"}]
        calls = [client.call(), client.call(), client.call(choice=1)]
        answers.extend(await asyncio.gather(*calls))

    ended = Ended(tmp_path, together)
    assert answers[0] == answers[1]
    assert answers[0].call_id != answers[2].call_id
    assert len(recorded(ended.stand).calls) == 2


def test_a_client_that_hangs_up_ends_nothing(tmp_path: Path) -> None:
    """Its retry gets the call that was under way."""

    async def impatient(client: Client) -> None:
        client.messages = [{"role": "user", "content": "1"}]
        first = asyncio.ensure_future(client.call())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        first.cancel()
        await client.call(retry=1)

    ended = Ended(tmp_path, impatient)
    assert len(recorded(ended.stand).calls) == len(ended.engine.requests) == 1
    assert not recorded(ended.stand).calls[0].unheard  # the retry waited for it


def test_the_runs_sampling_is_forced_and_what_was_asked_is_said(tmp_path: Path) -> None:
    answers = []

    async def asks(client: Client) -> None:
        client.messages = [{"role": "user", "content": "1"}]
        requested = {"temperature": 0.2, "top_p": 1.0, "seed": 7}
        answers.append(await client.call(requested=requested, max_tokens=2))

    ended = Ended(tmp_path, asks)
    (request,) = ended.engine.requests
    assert (request.sampling.temperature, request.sampling.max_new_tokens) == (1.0, 2)
    assert answers[0].overruled == {"temperature": 0.2, "seed": 7}
    assert '"seed": 7' in recorded(ended.stand).calls[0].overruled
    assert answers[0].finish_reason == "length"


def test_what_would_bend_the_distribution_is_refused(tmp_path: Path) -> None:
    async def bends(client: Client) -> None:
        client.messages = [{"role": "user", "content": "1"}]
        with pytest.raises(CallRefusedError, match="grammar is not served") as caught:
            await client.call(constrained="grammar")
        assert caught.value.status == 400
        await client.call()

    ended = Ended(tmp_path, bends)
    (failed,) = ended.stand.read(CALLS.name, CallFailed)
    assert (failed.status, len(recorded(ended.stand).calls)) == (400, 1)


def test_a_stop_string_ends_the_record_where_it_ends_the_answer(tmp_path: Path) -> None:
    """What was sampled behind it nobody has seen, so it is not there to be learnt from."""
    answers: list[CallAnswer] = []

    async def stops(client: Client) -> None:
        client.messages = [{"role": "user", "content": "1"}]
        answers.append(await client.call(stop=tuple("0123456789+=")))

    ended = Ended(tmp_path, stops)
    (cut,), (answer,) = recorded(ended.stand).calls, answers
    assert answer.stopped_by
    assert (answer.finish_reason, answer.parsed.content) == ("stop", "")
    assert sampled_tokens(cut) == len(answer.logprobs) == len(answer.tokens) == 1
    assert ended.engine.num_sampled == ended.engine.length


@pytest.mark.parametrize(
    ("limits", "told"),
    [({"max_calls": 2}, "agent.max_calls"), ({"max_tokens": 6}, "agent.max_tokens")],
)
def test_a_limit_is_told_and_what_was_done_is_judged(
    tmp_path: Path, limits: dict[str, int], told: str
) -> None:
    """The agent's own failure behind it counts as the limit."""

    async def goes_on(client: Client) -> Ending:
        try:
            await three_turns(client)
        except CallRefusedError as err:
            refused.append((err.status, err.retry_after_s))
            return Ending(is_failed=True, detail=str(err))
        return Ending()

    refused: list[tuple[int, float | None]] = []
    ended = Ended(tmp_path, goes_on, **limits)
    (closed,), (trajectory,) = recorded(ended.stand).closed, ended.trajectories
    assert closed.kind == "limit"
    assert told in closed.detail
    assert refused == [(400, None)]
    assert len([s for s in trajectory.segments if s.author == "policy"]) == 2


def test_out_of_room_is_told_as_openai_does(tmp_path: Path) -> None:
    async def fills(client: Client) -> None:
        await client.say("1")
        with pytest.raises(CallRefusedError, match="maximum context length is 128") as caught:
            await client.say("1010" * 80)
        assert (caught.value.status, caught.value.code) == (400, "context_length_exceeded")

    ended = Ended(tmp_path, fills)
    assert recorded(ended.stand).closed[0].kind == "limit"
    assert len(ended.trajectories) == 1


def test_an_agent_that_fails_is_no_reward_of_zero(tmp_path: Path) -> None:
    async def fails(client: Client) -> Ending:
        await client.say("1")
        return Ending(is_failed=True, detail="agent.py:7: it broke")

    ended = Ended(tmp_path, fails)
    (letter,), (closed,) = ended.letters, recorded(ended.stand).closed
    assert (letter.reason, letter.detail, letter.permanent) == ("agent", closed.detail, False)
    assert closed.kind == "agent"
    assert not ended.trajectories
    assert not ended.outcomes


def test_an_agent_that_says_nothing_is_set_aside(tmp_path: Path) -> None:
    async def silent(_: Client) -> None:
        return None

    ended = Ended(tmp_path, silent)
    assert ended.letters[0].reason == "agent"
    assert "has no call" in ended.letters[0].detail


def test_a_strangers_bytes_among_the_calls_stop_nobody(tmp_path: Path) -> None:
    """They are read before a partition's first session begins; the audit counts them."""
    stand = Stand(tmp_path)
    stand.publish(0)
    rubbish = [
        Outgoing(topic=topic.name, key=b"0/0", value=[b"rubbish"], partition=0)
        for topic in (CALLS, OUTCOMES)
    ]
    stand.send(*rubbish)
    stand.issue("0", 1)
    loop = worker_of(stand, EndsTurns(), ScriptedAgent(three_turns))
    tick_until(loop, lambda: bool(stand.read(TRAJECTORIES.name, Trajectory)))
    loop.close()


def test_a_lost_process_is_started_again_and_goes_on(tmp_path: Path) -> None:
    """Its calls are answered from the log; it is one session, with two starts."""
    heard: list[list[str]] = []

    async def is_lost(client: Client) -> None:
        heard.append([])
        for number, text in enumerate(("1", "10", "101")):
            heard[-1].append((await client.say(text)).parsed.content)
            if number == 1 and len(heard) == 1:
                raise LostAgentError("its process ended")

    ended = Ended(tmp_path, is_lost)
    log = recorded(ended.stand)
    assert heard[0] == heard[1][:2]
    assert [o.start for o in log.opened] == [0, 1]
    assert [call.start for call in log.calls] == [0, 0, 1]
    assert [r.call_id for r in log.replays] == [c.call_id for c in log.calls[:2]]
    assert len(ended.trajectories) == 1


@pytest.mark.parametrize("how", ["returned", "posted", "posted twice"])
def test_the_agents_own_number_is_the_reward(tmp_path: Path, how: str) -> None:
    async def knows(client: Client) -> Ending | None:
        await client.say("1")
        report = Report(reward=0.25, parts={"half": 0.5})
        if how == "returned":
            return Ending(report=report)
        posted = [await client.open_sessions.report(client.start.key, report) for _ in how.split()]
        assert len(set(posted)) == 1
        return None

    ended = Ended(tmp_path, knows, by_agent=True)
    (trajectory,), (outcome,) = ended.trajectories, ended.outcomes
    assert (trajectory.reward, trajectory.reward_parts) == (0.25, {"half": 0.5})
    assert (outcome.reward, outcome.grader) == (0.25, "agent")


def test_an_agent_that_should_give_a_reward_and_does_not_is_set_aside(tmp_path: Path) -> None:
    ended = Ended(tmp_path, three_turns, by_agent=True)
    assert ended.letters[0].reason == "agent"
    assert "gave no reward" in ended.letters[0].detail


def test_an_agent_that_takes_too_long_is_ended_and_judged(tmp_path: Path) -> None:
    gone = []

    async def waits(client: Client) -> None:
        await client.say("1")
        try:
            await asyncio.sleep(3600)
        finally:
            gone.append(client.start.session_id)

    ended = Ended(tmp_path, waits, timeout_s=0.5)
    (closed,) = recorded(ended.stand).closed
    assert (closed.kind, gone) == ("limit", ["0/0"])
    assert "agent.timeout_s" in closed.detail
    assert len(ended.trajectories) == 1


def test_a_session_that_is_not_over_in_time_is_closed_and_set_aside(tmp_path: Path) -> None:
    async def waits(client: Client) -> None:
        await client.say("1")
        await asyncio.sleep(3600)

    ended = Ended(tmp_path, waits, deadline_s=0.5)
    (closed,), (letter,) = recorded(ended.stand).closed, ended.letters
    assert closed.kind == letter.reason == "infrastructure"
    assert "rollout.sample_deadline_s" in letter.detail


def test_all_samples_of_a_group_have_the_same_agent(tmp_path: Path) -> None:
    """Drawn by weight: they are compared with each other."""
    loop = worker_of(Stand(tmp_path), EndsTurns(), ScriptedAgent(three_turns))
    stage: Any = loop._stage
    sessions = stage._player.sessions
    (member,) = sessions.members
    names = {"often": 3.0, "rarely": 1.0}
    sessions.members = [
        replace(member, section=replace(member.section, name=name, weight=weight))
        for name, weight in names.items()
    ]
    drawn = {
        group: {sessions.member_of(make_prompt(str(group), n, 4)).section.name for n in range(4)}
        for group in range(400)
    }
    assert {len(found) for found in drawn.values()} == {1}
    often = sum(found == {"often"} for found in drawn.values())
    assert 260 < often < 340
    loop.close()


def test_an_agent_that_says_that_it_is_done_need_not_end_by_itself(tmp_path: Path) -> None:
    async def says_so(client: Client) -> None:
        await client.say("1")
        await client.open_sessions.close(client.start.key, "environment", "the sandbox is away")
        with pytest.raises(CallRefusedError):
            await client.open_sessions.close(client.start.key, "infrastructure", "")

    ended = Ended(tmp_path, says_so)
    (letter,) = ended.letters
    assert (letter.reason, letter.detail) == ("environment", "the sandbox is away")


def test_a_key_of_a_session_that_is_over_is_told_so(tmp_path: Path) -> None:
    """410, which no client tries again."""
    keys = []

    async def leaks(client: Client) -> None:
        keys.append(client)
        await client.say("1")

    ended = Ended(tmp_path, leaks)
    for key, status in ((keys[0].start.key, 503), ("rls-other", 401)):
        with pytest.raises(CallRefusedError) as caught:
            ended.agent.open_sessions._session(key)
        assert caught.value.status == status
    ended.agent.open_sessions._is_ending = False
    with pytest.raises(CallRefusedError) as caught:
        ended.agent.open_sessions._session(keys[0].start.key)
    assert caught.value.status == 410
