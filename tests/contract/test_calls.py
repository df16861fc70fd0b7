"""Whoever answers calls: no call is sampled twice, and each refusal has its status."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest

from rlstreams.workers.gateway.keys import Keys
from rlstreams.workers.gateway.port import CallRefusedError, CallRequest, Calls, Report
from tests.fake_calls import FakeCalls

DEADLINE_S = 60.0
NEVER_S = 2**33
ASKED = CallRequest(
    dialect="chat",
    body=b'{"messages": [{"role": "user", "content": "1+2="}]}',
    messages=({"role": "user", "content": "1+2="},),
    max_tokens=4,
)


@dataclass(frozen=True)
class Rig:
    """Calls to hold to their port, and how to hold their sampler."""

    calls: Calls
    key: Callable[[int], str]  # of a start of the session
    num_sampled: Callable[[], int]
    hold: Callable[[bool], None]  # samples wait


@asynccontextmanager
async def fake() -> AsyncIterator[Rig]:
    keys = Keys("secret")
    calls = FakeCalls(keys)

    def hold(is_held: bool) -> None:
        (calls.gate.clear if is_held else calls.gate.set)()

    yield Rig(calls, lambda start: keys.make("7/3", start, NEVER_S),
              lambda: len(calls.requests), hold)  # fmt: skip


RIGS: dict[str, Callable[[], AbstractAsyncContextManager[Rig]]] = {"fake": fake}


@pytest.fixture(params=RIGS)
def run(
    request: pytest.FixtureRequest,
) -> Callable[[Callable[[Rig], Coroutine[Any, Any, Any]]], Any]:
    """Runs a coroutine function with a rig."""

    async def with_rig(test: Callable[[Rig], Coroutine[Any, Any, Any]]) -> Any:
        async with asyncio.timeout(DEADLINE_S), RIGS[request.param]() as rig:
            return await test(rig)

    return lambda test: asyncio.run(with_rig(test))


def test_an_answer_says_what_was_sampled(run) -> None:
    async def body(rig: Rig) -> None:
        answer = await rig.calls.call(rig.key(0), ASKED)
        assert len(answer.call_id) == 32
        assert len(answer.tokens) == len(answer.logprobs) > 0
        assert all(logprob <= 0 for logprob in answer.logprobs)
        assert answer.finish_reason in ("stop", "length", "tool_calls")
        assert not answer.is_replayed
        assert answer.prompt_tokens == rig.calls.count_tokens(rig.key(0), ASKED.messages)
        assert rig.num_sampled() == 1

    run(body)


def test_a_repeat_is_another_call_and_a_marked_retry_the_same(run) -> None:
    """An agent may ask the same twice; a client that tries again has asked once."""

    async def body(rig: Rig) -> None:
        first = await rig.calls.call(rig.key(0), ASKED)
        again = await rig.calls.call(rig.key(0), replace(ASKED, retry=1))
        assert (again.call_id, again.tokens) == (first.call_id, first.tokens)
        second = await rig.calls.call(rig.key(0), ASKED)
        assert second.call_id != first.call_id
        last = await rig.calls.call(rig.key(0), replace(ASKED, retry=2))
        assert last.call_id == second.call_id
        assert rig.num_sampled() == 2

    run(body)


def test_a_retry_of_what_never_arrived_is_sampled(run) -> None:
    async def body(rig: Rig) -> None:
        answer = await rig.calls.call(rig.key(0), replace(ASKED, retry=1))
        assert (answer.is_replayed, rig.num_sampled()) == (False, 1)

    run(body)


def test_a_request_equal_to_one_under_way_joins_it(run) -> None:
    """Even if the client that asked first has hung up."""

    async def body(rig: Rig) -> None:
        rig.hold(True)
        gone = asyncio.ensure_future(rig.calls.call(rig.key(0), ASKED))
        await asyncio.sleep(0.05)
        gone.cancel()
        joined = [
            asyncio.ensure_future(rig.calls.call(rig.key(0), replace(ASKED, retry=n)))
            for n in (0, 1)
        ]
        await asyncio.sleep(0.05)
        rig.hold(False)
        one, other = await asyncio.gather(*joined)
        assert one.call_id == other.call_id
        assert rig.num_sampled() == 1

    run(body)


def test_first_tries_side_by_side_are_calls_of_their_own(run) -> None:
    """An agent that asks the same four times, to choose among four answers, is not told one, and
    waits for none: all are sampled at the same time."""

    async def body(rig: Rig) -> None:
        rig.hold(True)
        asked = [
            asyncio.ensure_future(rig.calls.call(rig.key(0), replace(ASKED, **how)))
            for how in ({"retry": 0}, {"retry": 0}, {"idempotency_key": "a"}, {"retry": 0})
        ]
        await asyncio.sleep(0.05)
        assert rig.num_sampled() == 4
        rig.hold(False)
        answers = await asyncio.gather(*asked)
        assert len({answer.call_id for answer in answers}) == 4
        again = await rig.calls.call(rig.key(0), replace(ASKED, idempotency_key="a"))
        assert (again.call_id, rig.num_sampled()) == (answers[2].call_id, 4)

    run(body)


def test_an_answer_that_nobody_heard_is_given_to_who_asks_again(run) -> None:
    """It need not say that it is another try; once it was heard, the same request is a new call."""

    async def body(rig: Rig) -> None:
        rig.hold(True)
        gone = asyncio.ensure_future(rig.calls.call(rig.key(0), ASKED))
        await asyncio.sleep(0.05)
        gone.cancel()
        rig.hold(False)
        await asyncio.sleep(0.2)
        first = await rig.calls.call(rig.key(0), ASKED)
        assert (first.is_replayed, rig.num_sampled()) == (True, 1)
        second = await rig.calls.call(rig.key(0), ASKED)
        assert second.call_id != first.call_id

    run(body)


def test_choices_are_siblings(run) -> None:
    async def body(rig: Rig) -> None:
        answers = await asyncio.gather(
            *(rig.calls.call(rig.key(0), replace(ASKED, choice=n)) for n in range(3))
        )
        assert len({answer.call_id for answer in answers}) == 3

    run(body)


def test_an_agent_that_starts_anew_is_answered_from_the_record(run) -> None:
    """The n-th of equal requests by the n-th of equal calls, word for word; then it goes on."""

    async def body(rig: Rig) -> None:
        before = [await rig.calls.call(rig.key(0), ASKED) for _ in range(2)]
        after = [await rig.calls.call(rig.key(1), ASKED) for _ in range(3)]
        assert [a.call_id for a in after[:2]] == [b.call_id for b in before]
        assert [a.created_s for a in after[:2]] == [b.created_s for b in before]
        assert [a.parsed for a in after[:2]] == [b.parsed for b in before]
        assert [a.is_replayed for a in after] == [True, True, False]
        assert rig.num_sampled() == 3

    run(body)


REFUSED = {
    "no key": (401, lambda rig: rig.calls.call("", ASKED)),
    "a foreign key": (401, lambda rig: rig.calls.call(Keys("x").make("7/3", 0, NEVER_S), ASKED)),
    "a grammar": (
        400,
        lambda rig: rig.calls.call(rig.key(0), replace(ASKED, constrained="logit_bias")),
    ),
    "no room": (
        400,
        lambda rig: rig.calls.call(
            rig.key(0), replace(ASKED, messages=({"role": "user", "content": "1 " * 9_000},))
        ),
    ),
    "a report without a key": (401, lambda rig: rig.calls.report("", Report(reward=1.0))),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_is_refused_for_good(run, name: str) -> None:
    status, ask = REFUSED[name]

    async def body(rig: Rig) -> None:
        with pytest.raises(CallRefusedError) as refused:
            await ask(rig)
        assert (refused.value.status, refused.value.retry_after_s) == (status, None)
        assert refused.value.code
        assert rig.num_sampled() == 0

    run(body)


def test_a_closed_session_is_gone(run) -> None:
    """For calls; an outcome may come later. To close it again changes nothing."""

    async def body(rig: Rig) -> None:
        await rig.calls.call(rig.key(0), ASKED)
        await rig.calls.beat(rig.key(0))
        for kind in ("ended", "agent"):
            await rig.calls.close(rig.key(0), kind, "")
        for ask in (
            lambda: rig.calls.call(rig.key(0), replace(ASKED, max_tokens=3)),
            lambda: rig.calls.beat(rig.key(0)),
        ):
            with pytest.raises(CallRefusedError) as refused:
                await ask()
            assert (refused.value.status, refused.value.retry_after_s) == (410, None)
        assert await rig.calls.report(rig.key(0), Report(reward=1.0))

    run(body)


def test_an_outcome_that_is_reported_again_is_the_same(run) -> None:
    async def body(rig: Rig) -> None:
        report = Report(reward=0.5, parts={"a": 1.0}, note="n")
        ids = [
            await rig.calls.report(rig.key(0), said)
            for said in (
                report,
                report,
                replace(report, reward=1.0),
                Report(reward=1, outcome_id="x"),
            )
        ]
        assert ids[0] == ids[1] != ids[2]
        assert ids[3] == "x"

    run(body)
