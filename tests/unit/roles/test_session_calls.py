"""Calls of a session in the rollout role: experts, when no more are taken, a start that forks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest

from rlstreams.schemas.events import CallFailed
from rlstreams.streams.log.topics import CALLS
from rlstreams.streams.rows import rows_of_sample
from rlstreams.streams.sessions.session import sampled_tokens
from rlstreams.workers.agents.agent import Ending, LostAgentError
from rlstreams.workers.engines.base import GeneratedSegment, SampleRequest
from rlstreams.workers.gateway.open_session import MAX_REFUSALS
from rlstreams.workers.gateway.port import CallAnswer, CallRefusedError, Report
from rlstreams.workers.gateway.shared import BUSY_S, CALLS_PER_SLOT
from tests.fake_engine import NUM_EXPERTS
from tests.unit.roles.sessions_stand import Client, recorded
from tests.unit.roles.test_sessions import Ended, three_turns
from tests.unit.roles.test_turns import EndsTurns


def test_routed_experts_of_calls_are_those_of_the_sample(tmp_path: Path) -> None:
    """A call records the rows behind its parent alone; together they are what the engine gave."""
    ended = Ended(tmp_path, three_turns)
    (trajectory,), calls = ended.trajectories, recorded(ended.stand).calls
    assert [call.routed_experts_start > 0 for call in calls] == [False, True, True]
    whole = np.concatenate([s.token_ids.numpy() for s in trajectory.segments])
    experts = trajectory.routed_experts
    assert experts is not None
    rows = experts.numpy()
    assert len(rows) == len(whole) - 1  # the last token was passed by nobody
    wanted = np.stack([whole, whole + 1], -1)[: len(rows), None] % NUM_EXPERTS
    assert rows.tolist() == wanted.tolist()
    assert trajectory.routed_experts_mask is None


def test_more_calls_than_the_engine_takes_are_told_when_to_come_again(tmp_path: Path) -> None:
    """Their try is no call, and no record; sent again it is sampled."""
    refused: list[CallRefusedError] = []

    async def crowds(client: Client) -> None:
        most = CALLS_PER_SLOT * client.open_sessions.shared.engine.capacity
        client.messages = [{"role": "user", "content": "1"}]
        calls = [client.call(choice=number) for number in range(most + 1)]
        answers = await asyncio.gather(*calls, return_exceptions=True)
        refused.extend(one for one in answers if isinstance(one, CallRefusedError))
        await client.call(choice=most, retry=1)

    ended = Ended(tmp_path, crowds)
    assert [(one.status, one.retry_after_s) for one in refused] == [(429, BUSY_S)]
    log = recorded(ended.stand)
    assert len(log.calls) == len({call.call_id for call in log.calls}) > 1
    assert len(ended.engine.requests) == len(log.calls)
    assert not ended.stand.read(CALLS.name, CallFailed)


@pytest.mark.parametrize(
    ("limits", "num_calls", "num_tokens"), [({"max_calls": 3}, 3, 9), ({"max_tokens": 10}, 4, 10)]
)
def test_calls_side_by_side_keep_to_the_limits(
    tmp_path: Path, limits: dict[str, int], num_calls: int, num_tokens: int
) -> None:
    """Also those that are under way; no call is cut while another may leave it what it asks for."""
    refused: list[str] = []

    async def fans_out(client: Client) -> None:
        client.messages = [{"role": "user", "content": "1"}]
        calls = [client.call(choice=number, max_tokens=5) for number in range(6)]
        answers = await asyncio.gather(*calls, return_exceptions=True)
        refused.extend(str(one) for one in answers if isinstance(one, CallRefusedError))

    ended = Ended(tmp_path, fans_out, **limits)
    lengths = [sampled_tokens(call) for call in recorded(ended.stand).calls]
    assert (len(lengths), sum(lengths), set(lengths[:3])) == (num_calls, num_tokens, {3})
    assert len(refused) == 6 - num_calls
    assert all(f"agent.{name}" in why for name in limits for why in refused)
    assert recorded(ended.stand).closed[0].kind == "limit"


def test_a_start_that_forks_has_all_that_the_limits_allow(tmp_path: Path) -> None:
    """It was lost by no fault of its own: what the start before did takes nothing from it."""
    lost: list[int] = []

    async def forks(client: Client) -> None:
        client.messages = [{"role": "system", "content": str(len(lost))}]
        for number in range(4):
            await client.say("1")
            if number == 2 and not lost:
                lost.append(number)
                raise LostAgentError("its process ended")

    ended = Ended(tmp_path, forks, max_calls=4)
    assert [call.start for call in recorded(ended.stand).calls] == [0] * 3 + [1] * 4
    assert recorded(ended.stand).closed[0].kind == "ended"


def test_a_prompt_far_too_long_is_not_read_to_its_end(tmp_path: Path) -> None:
    """Its tokens would take the loop, on which all sessions wait, many seconds; also of a message
    that goes on with a call, and where tokens are counted."""
    read: list[int] = []

    async def pastes(client: Client) -> None:
        shared = client.open_sessions.shared
        encode = shared.tokenizer.encode_piece
        shared.tokenizer.encode_piece = lambda text, **how: (  # type: ignore[method-assign]
            read.append(len(text)), encode(text, **how),
        )[1]  # fmt: skip
        long = {"role": "user", "content": "10" * 1_000_000}
        for _ in range(2):
            client.messages.append(long)
            with pytest.raises(CallRefusedError, match="maximum context length is 128") as caught:
                await client.call()
            assert caught.value.code == "context_length_exceeded"
            assert client.open_sessions.count_tokens(client.start.key, [long]) > 128
            client.messages.pop()
            await client.say("1")

    assert len(recorded(Ended(tmp_path, pastes).stand).calls) == 2
    assert max(read) < 5_000


def test_an_agent_that_finds_no_room_and_gives_up_has_not_failed_by_its_code(
    tmp_path: Path,
) -> None:
    """Its client tried again a few times: the worker took too few calls."""

    async def gives_up(client: Client) -> Ending:
        most = CALLS_PER_SLOT * client.open_sessions.shared.engine.capacity
        client.messages = [{"role": "user", "content": "1"}]
        calls = [client.call(choice=number) for number in range(most + 1)]
        answers = await asyncio.gather(*calls, return_exceptions=True)
        [refused] = [str(one) for one in answers if isinstance(one, CallRefusedError)]
        return Ending(is_failed=True, detail=refused)

    (letter,) = Ended(tmp_path, gives_up).letters
    assert letter.reason == "infrastructure"
    assert "calls are under way" in letter.detail


def test_a_loop_of_refused_requests_does_not_fill_the_log(tmp_path: Path) -> None:
    async def loops(client: Client) -> None:
        await client.say("1")
        for number in range(150):
            client.messages = [{"role": "user", "content": str(number // 2)}]
            with pytest.raises(CallRefusedError):
                await client.call(constrained="grammar")
        for number in range(300):
            client.messages = [{"role": "user", "content": f"1{number}"}]
            with pytest.raises(CallRefusedError):
                await client.call()

    failed = Ended(tmp_path, loops, max_calls=1).stand.read(CALLS.name, CallFailed)
    assert len(failed) == len(set(failed)) == MAX_REFUSALS
    assert 75 == sum("grammar" in one.reason for one in failed)


class Holds(EndsTurns):
    """Samples its first turn, and no other."""

    num_cut = 0

    def __init__(self) -> None:
        super().__init__()
        self.holds = asyncio.Event()

    async def generate(self, request: SampleRequest) -> AsyncIterator[GeneratedSegment]:
        async for segment in super().generate(request):
            yield segment
            if len(self.requests) == 1:
                return
            self.holds.set()
            try:
                await asyncio.sleep(3600)
            finally:
                self.num_cut += 1


def test_a_session_that_ends_leaves_no_call_in_the_engine(tmp_path: Path) -> None:
    """A client that hung up ended nothing, the end of the session does: nobody will ask again, and
    what nobody heard is neither in the log nor the sample."""
    told: list[int] = []

    async def leaves(client: Client) -> None:
        await client.say("1")
        client.messages.append({"role": "user", "content": "10"})
        asked = asyncio.ensure_future(client.call())
        await engine.holds.wait()
        asked.cancel()
        await asyncio.sleep(0.1)
        told.append(engine.num_cut)

    engine = Holds()
    ended = Ended(tmp_path, leaves, engine=engine)
    assert (told, engine.num_cut) == ([0], 1)
    assert len(recorded(ended.stand).calls) == 1
    assert len([s for s in ended.trajectories[0].segments if s.author == "policy"]) == 1


@pytest.mark.parametrize("ignore", [(), (r"000\d+",)])
def test_a_clock_in_a_prompt_forks_unless_it_is_ignored(
    tmp_path: Path, ignore: tuple[str, ...]
) -> None:
    """Then its lost start is answered from the log, and the next call goes on behind it."""
    starts: list[list[CallAnswer]] = []

    async def tells_the_time(client: Client) -> None:
        starts.append([])
        client.messages = [{"role": "system", "content": "000" + "1" * len(starts)}]
        for text in ("1", "10"):
            starts[-1].append(await client.say(text))
            if len(starts) == 1:
                raise LostAgentError("its process ended")

    log = recorded(Ended(tmp_path, tells_the_time, ignore=ignore).stand)
    is_same = starts[0][0].call_id == starts[1][0].call_id
    assert (is_same, len(log.replays), len(log.calls)) == (bool(ignore), len(ignore), 3 - is_same)
    assert log.calls[-1].parent == log.calls[-2].call_id


def test_an_agent_that_begins_anew_and_does_otherwise_is_judged_for_that(tmp_path: Path) -> None:
    """Its tool answers differently: it forks there, and what its lost start did is beside it."""
    heard: list[list[CallAnswer]] = []

    async def forks(client: Client) -> None:
        heard.append([await client.say("1")])
        for text in ("10", "101", "11") if len(heard) == 1 else ("1011",):
            heard[-1].append(await client.say(text))
        if len(heard) == 1:
            raise LostAgentError("its process ended")

    ended = Ended(tmp_path, forks)
    log, (trajectory,) = recorded(ended.stand), ended.trajectories
    assert [call.start for call in log.calls] == [0, 0, 0, 0, 1]
    assert log.calls[4].parent == log.calls[0].call_id
    said = [s.token_ids.numpy().tolist() for s in trajectory.segments if s.author == "policy"]
    wanted = [log.calls[n].segments[0].token_ids.numpy().tolist() for n in (0, 4)]
    assert said == wanted


@pytest.mark.parametrize("asks_again", [False, True])
def test_an_answer_that_nobody_waits_for_is_not_the_end(tmp_path: Path, asks_again: bool) -> None:
    """The record says so; whoever asks the same later is given it, and a record says that, too."""

    async def gives_up(client: Client) -> None:
        await client.say("1")
        client.messages.append({"role": "user", "content": "10"})
        last = asyncio.ensure_future(client.call())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        last.cancel()
        session = client.open_sessions._open[client.start.session_id]
        await asyncio.wait(list(session._under_way))
        if asks_again:
            assert (await client.call()).is_replayed
            assert (await client.call(retry=1)).is_replayed

    ended = Ended(tmp_path, gives_up)
    log = recorded(ended.stand)
    assert [call.unheard for call in log.calls] == [False, True]
    assert [(r.start, r.call_id) for r in log.replays] == [(0, log.calls[1].call_id)] * asks_again
    policy = [s for s in ended.trajectories[0].segments if s.author == "policy"]
    assert len(policy) == 1 + asks_again


@pytest.mark.parametrize("branches", [False, True])
def test_another_history_begins_a_branch_and_says_why(tmp_path: Path, branches: bool) -> None:
    """The main chain is the trajectory; the branch is a row of it where the agent's table says so,
    and else stays in the log."""

    async def compacts(client: Client) -> None:
        await client.say("1")
        await client.say("10")
        client.messages = [{"role": "user", "content": "0"}]
        await client.say("11")

    ended = Ended(tmp_path, compacts, branches=branches)
    calls, opened = recorded(ended.stand).calls, recorded(ended.stand).opened
    assert [one.branches for one in opened] == [branches]
    assert [call.parent is None for call in calls] == [True, False, True]
    assert "begin" in calls[2].why_root
    main, *others = rows_of_sample(ended.trajectories[0])
    assert [sum(s.author == "policy" for s in row.segments) for row in (main, *others)] == (
        [2, 1] if branches else [2]
    )


@pytest.mark.parametrize("branches", [False, True])
def test_calls_beside_the_task_are_recorded_and_not_learnt_from(
    tmp_path: Path, branches: bool
) -> None:
    """By the model's name, by the system's text or by the client's word; also where branches are
    learnt from, and where a lost start is answered from the log."""
    asides = {"by its model": {"model": "a/small-1"}, "by itself": {"is_trained": False}}
    heard: list[list[CallAnswer]] = []

    async def has_titles(client: Client) -> None:
        heard.append([])
        client.messages = [{"role": "user", "content": "0"}]
        for changes in asides.values():
            heard[-1].append(await client.call(**changes))
        client.messages = [{"role": "developer", "content": [{"type": "text", "text": "0110"}]}]
        heard[-1].append(await client.say("0"))  # by its system prompt
        client.messages = []
        heard[-1].append(await client.say("0"))
        heard[-1].append(await client.say("1"))
        client.messages.append({"role": "user", "content": "10"})
        heard[-1].append(await client.call(is_trained=False))  # a summary of it all
        if len(heard) == 1:
            raise LostAgentError("its process ended")

    settings = {"auxiliary_models": ("small",), "auxiliary_prompts": ("^01+0$",)}
    ended = Ended(tmp_path, has_titles, branches=branches, **settings)
    log, (trajectory,) = recorded(ended.stand), ended.trajectories
    told = [[answer.is_trained for answer in start] for start in heard]
    assert told == [[False, False, False, True, True, False]] * 2
    assert [call.is_trained for call in log.calls] == told[0]
    assert (len(log.calls), len(log.replays)) == (6, 6)
    policy = [s.token_ids for s in trajectory.segments if s.author == "policy"]
    assert policy == [call.segments[0].token_ids for call in log.calls[3:5]]
    assert len(list(rows_of_sample(trajectory))) == 1


def test_a_session_of_asides_alone_is_set_aside(tmp_path: Path) -> None:
    async def titles(client: Client) -> None:
        client.messages = [{"role": "user", "content": "0"}]
        await client.call(is_trained=False)

    ended = Ended(tmp_path, titles)
    [letter] = ended.letters
    assert "none of the 1 calls up to call" in letter.detail
    assert letter.reason == "agent"


def test_half_of_a_character_ends_no_worker(tmp_path: Path) -> None:
    """Programs cut texts in the middle of one: the log has an escape in its place."""

    async def cuts(client: Client) -> None:
        await client.say("1")
        report = Report(reward=1.0, note="a\ud83d", parts={"\ude00": 1.0})
        await client.open_sessions.report(client.start.key, report)
        await client.open_sessions.close(client.start.key, "environment", "gone\ud83d")

    ended = Ended(tmp_path, cuts, by_agent=True)
    (outcome,), (letter,) = ended.outcomes, ended.letters
    assert (outcome.note, outcome.parts) == ("a\\ud83d", {"\\ude00": 1.0})
    assert (letter.reason, letter.detail) == ("environment", "gone\\ud83d")
