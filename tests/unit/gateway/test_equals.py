"""Equal requests: those that a client asks side by side are sampled side by side, and one that it
sends again is the same call."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import suppress
from pathlib import Path

import pytest

from rlstreams.workers.agents.agent import LostAgentError
from rlstreams.workers.engines.base import GeneratedSegment, SampleRequest
from rlstreams.workers.gateway.equals import AskedCall, EqualCalls
from rlstreams.workers.gateway.port import CallAnswer, CallRefusedError, CallRequest, Parsed
from rlstreams.workers.gateway.shared import CALLS_PER_SLOT
from rlstreams.workers.model.base import EngineError
from tests.unit.roles.sessions_stand import Client, ScriptedAgent, recorded, worker_of
from tests.unit.roles.stand import Stand, tick_until
from tests.unit.roles.test_sessions import Ended
from tests.unit.roles.test_turns import EndsTurns

MANY = 8
ANSWER = CallAnswer(
    call_id="", created_s=0, parsed=Parsed(content=""), finish_reason="stop", prompt_tokens=0,
    tokens=(), logprobs=(),
)  # fmt: skip


def tried(retry: int | None = None, key: str = "") -> CallRequest:
    return CallRequest(dialect="chat", body=b"", messages=(), retry=retry, idempotency_key=key)


def begun(equal: EqualCalls, *requests: CallRequest) -> list[AskedCall]:
    """New calls, each with a client that waits."""
    made = []
    for request in requests:
        assert equal.found(request) is None
        answered = {one.occurrence for one in equal.calls if one.answer}
        made.append(equal.begin(request, answered))
        made[-1].num_listening = 1
    return made


def answer(*calls: AskedCall) -> None:
    for one in calls:
        one.is_heard, one.answer, one.num_listening = one.num_listening > 0, ANSWER, 0


def taken(equal: EqualCalls, request: CallRequest) -> AskedCall | None:
    """The call of a request, which waits for it from now on."""
    if (one := equal.found(request)) is not None:
        one.num_listening += 1
        one.tried = max(one.tried, request.retry or 0)
    return one


def test_first_tries_are_calls_of_their_own() -> None:
    equal = EqualCalls()
    assert [one.occurrence for one in begun(equal, *[tried(0)] * 3)] == [0, 1, 2]


def test_the_try_after_a_client_hung_up_is_that_call() -> None:
    """Whichever of them it hung up on, whether its answer came meanwhile, and once."""
    equal = EqualCalls()
    calls = begun(equal, *[tried(0)] * 4)
    calls[1].num_listening = calls[2].num_listening = 0
    answer(calls[2])
    assert [taken(equal, tried(1)), taken(equal, tried(1))] == calls[1:3]


def test_the_try_after_a_refusal_is_no_other_clients_call() -> None:
    """Though the others are under way or answered; it is the occurrence that failed."""
    equal = EqualCalls()
    first, failed, last = begun(equal, *[tried(0)] * 3)
    equal.refuse(failed)
    answer(last)
    [again] = begun(equal, tried(1))
    assert again.occurrence == 1
    equal.refuse(again)
    assert taken(equal, tried(1)) is first  # a second one, whose client is taken for gone
    assert begun(equal, tried(2))[0].occurrence == 1


def test_a_hang_up_that_nobody_noticed_is_the_same_call() -> None:
    """A connection may be gone without a word, or an answer be lost on it."""
    equal = EqualCalls()
    calls = begun(equal, tried(0), tried(0))
    assert taken(equal, tried(1)) is calls[0]
    answer(*calls)
    assert taken(equal, tried(2)) is calls[1]
    assert taken(equal, tried(1)) is None


def test_later_tries_of_what_never_came_here_are_calls_of_their_own() -> None:
    """Their worker died, and each client tries again at its own pace."""
    equal = EqualCalls()
    assert len(begun(equal, tried(1), tried(2), tried(1), tried(3))) == 4


def test_who_does_not_count_asks_once() -> None:
    equal = EqualCalls()
    [one] = begun(equal, tried())
    assert taken(equal, tried()) is one
    answer(one)
    begun(equal, tried())


def test_a_key_names_a_call() -> None:
    equal = EqualCalls()
    one, other = begun(equal, tried(key="a"), tried(0, "b"))
    one.num_listening = 0
    assert equal.found(tried(key="b")) is other
    assert equal.found(tried(1, "b")) is other
    assert equal.found(tried()) is None  # it has no name, so it is neither
    answer(one, other)
    assert equal.found(tried(key="a")) is one
    begun(equal, tried(1, "c"))


class Gathers(EndsTurns):
    """Samples nothing before `MANY` requests are there, all at the same time; may fail some, and
    stand still behind others."""

    def __init__(self, fails: Iterable[int] = (), stands: Iterable[int] = ()) -> None:
        super().__init__()
        self.fails, self.stands = set(fails), set(stands)
        self.all_here = asyncio.Event()

    async def generate(self, request: SampleRequest) -> AsyncIterator[GeneratedSegment]:
        self.requests.append(request)
        number = len(self.requests) - 1
        if len(self.requests) == MANY:
            self.all_here.set()
        await self.all_here.wait()
        if number in self.fails:
            raise EngineError("a server died")
        if number in self.stands:
            await asyncio.Event().wait()
        async for segment in super(EndsTurns, self).generate(request):
            yield segment


@pytest.mark.parametrize("keys", [False, True])
def test_they_are_sampled_at_the_same_time(tmp_path: Path, keys: bool) -> None:
    """By clients that count their tries, or name each request; and answered alike in a new
    start of the agent, each of its own, in the order in which they come."""
    heard: list[list[CallAnswer]] = []

    async def together(client: Client) -> None:
        client.messages = [{"role": "user", "content": "1"}]
        how = [{"idempotency_key": str(n)} if keys else {"retry": 0} for n in range(MANY)]
        heard.append(await asyncio.gather(*(client.call(**one) for one in how)))
        if len(heard) == 1:
            raise LostAgentError("its process ended")

    log = recorded(Ended(tmp_path, together, engine=Gathers()).stand)
    assert len(log.calls) == len(log.replays) == MANY
    named = [[one.call_id for one in answers] for answers in heard]
    assert named[0] == named[1]
    assert len(set(named[0])) == MANY
    occurrences = {call.call_id: call.occurrence for call in log.calls}
    assert [occurrences[name] for name in named[0]] == [*range(MANY)]


def test_the_next_try_of_one_that_failed_takes_no_siblings_answer(tmp_path: Path) -> None:
    answers: list[CallAnswer] = []

    async def patient(client: Client) -> CallAnswer:
        for retry in range(3):
            with suppress(CallRefusedError):
                return await client.call(retry=retry)
        raise AssertionError("each was refused")

    async def together(client: Client) -> None:
        client.messages = [{"role": "user", "content": "1"}]
        client.open_sessions.shared.max_attempts = 1
        answers.extend(await asyncio.gather(*(patient(client) for _ in range(MANY))))

    log = recorded(Ended(tmp_path, together, engine=Gathers(fails=(1, 4))).stand)
    assert len({one.call_id for one in answers}) == len(log.calls) == MANY
    assert sorted(call.occurrence for call in log.calls) == [*range(MANY)]


def test_those_that_a_kill_cut_are_sampled_again_and_the_others_are_not(tmp_path: Path) -> None:
    """The n-th of them is answered by the n-th, though later ones were recorded before it."""
    stand = Stand(tmp_path)
    stand.publish(0)
    stand.issue("0", 1)
    heard: list[list[CallAnswer]] = []

    async def together(client: Client) -> None:
        client.messages = [{"role": "user", "content": "1"}]
        heard.append(await asyncio.gather(*(client.call(retry=0) for _ in range(MANY))))

    cut = (0, 3, 6)
    killed, engine = Gathers(stands=cut), EndsTurns()
    loop = worker_of(stand, killed, ScriptedAgent(together))
    tick_until(loop, lambda: len(recorded(stand).calls) == MANY - len(cut))
    loop.close()
    loop = worker_of(stand, engine, ScriptedAgent(together))
    tick_until(loop, lambda: bool(heard))
    loop.close()
    log = recorded(stand)
    occurrences = {call.call_id: call.occurrence for call in log.calls}
    assert [occurrences[one.call_id] for one in heard[0]] == [*range(MANY)]
    assert [one.is_replayed for one in heard[0]] == [n not in cut for n in range(MANY)]
    again = [request.sample_id for request in engine.requests]
    assert again == [killed.requests[n].sample_id for n in cut]


def test_more_than_the_engine_takes_are_answered_one_after_another(tmp_path: Path) -> None:
    """An agent that asks the same often is not refused what it waited for before."""
    answers: list[CallAnswer] = []

    async def together(client: Client) -> None:
        most = CALLS_PER_SLOT * client.open_sessions.shared.engine.capacity
        client.messages = [{"role": "user", "content": "1"}]
        answers.extend(await asyncio.gather(*(client.call(retry=0) for _ in range(2 * most))))

    engine = Gathers()
    assert len(recorded(Ended(tmp_path, together, engine=engine).stand).calls) == len(answers)
    assert len({one.call_id for one in answers}) == len(engine.requests) == len(answers)
