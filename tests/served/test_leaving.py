"""Requests that nobody waits for any more: their place, their end at the server, their tokens."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import numpy as np
import pytest

from rlstreams.workers.engines.base import FinishReason, PauseMode
from rlstreams.workers.engines.served.running import Running
from tests.contract.engine_rigs import PROMPT, collect, long_request, request
from tests.served.test_gate import until_sampling
from tests.servers.fake_server import VERSIONS
from tests.servers.world import World
from tests.waiting import until


async def test_who_was_cancelled_in_this_tick_of_the_loop_is_given_no_place(world: World) -> None:
    """It withdraws in the next tick; whoever waits behind it is served all the same."""
    world.serve()
    async with world.engine(limit=1) as engine:
        await engine.pull(world.publish(0), world.channel)
        server = engine._monitors[0].server
        other = Running("2/0/0", None, None, {}, None)  # type: ignore[arg-type]
        server.requests.begin(other)
        first, second = (
            asyncio.create_task(collect(engine, request(f"{i}/0/0"))) for i in range(2)
        )
        await until(lambda: engine._num_waiting == 2, "they do not wait")
        server.requests.end(other)
        engine.dispatch()
        first.cancel()
        assert {0} == {s.policy_version for s in await second}
        with pytest.raises(asyncio.CancelledError):
            await first
        assert 0 == len(server.requests)


@pytest.mark.parametrize("flavour", VERSIONS)
async def test_a_server_is_told_of_a_request_that_nobody_awaits(world: World, flavour: str) -> None:
    """By its own route where it has one: SGLang looks for a closed connection every few seconds."""
    server = world.serve(flavour)
    route = {"vllm-0.32.0": "/abort_requests", "vllm-0.25.1": ""}.get(flavour, "/abort_request")
    async with world.engine() as engine:
        await engine.pull(world.publish(0), world.channel)
        task = asyncio.create_task(collect(engine, long_request("0/0/0")))
        await until_sampling(server)
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        await until(lambda: not server.core.jobs, "it is sampled for nobody")
        if route:
            await until(lambda: route in server.called, "it was not told")


@pytest.mark.parametrize("flavour", VERSIONS)
async def test_a_request_that_a_pause_overtakes_is_cut_too(world: World, flavour: str) -> None:
    """It waits in the paused server, and the pause, or a pull, would wait for it in vain."""
    server = world.serve(flavour)
    async with world.engine(again_s=0.02) as engine:
        await engine.pull(world.publish(0), world.channel)
        server.admits = False
        running = asyncio.create_task(collect(engine, long_request("0/0/0")))
        await until(lambda: bool(server.asked), "it does not come in")
        server.called.clear()
        pausing = asyncio.create_task(engine.sleep())
        await until(lambda: bool(server.called), "it is not paused")
        server.admits = True
        await pausing
        assert FinishReason.ABORT is (await running)[-1].finish_reason


async def test_a_request_at_the_door_of_a_paused_server_is_hung_up_on(world: World) -> None:
    """SGLang lets it in at the resumption; the pause does not wait for that."""
    server = world.serve("sglang-0.5.17")
    async with world.engine(again_s=0.02) as engine:
        await engine.pull(world.publish(0), world.channel)
        server.admits = False
        running = asyncio.create_task(collect(engine, long_request("0/0/0")))
        await until(lambda: bool(server.asked), "it does not come in")
        await engine.sleep()
        (segment,) = await running
        assert (0, FinishReason.ABORT) == (len(segment.token_ids), segment.finish_reason)


async def test_all_tokens_of_an_answer_count_whoever_listens(world: World) -> None:
    """They were sampled, though only the first of two segments is taken."""
    server = world.serve()
    async with world.engine() as engine:
        await engine.pull(world.publish(0), world.channel)
        answer = engine.generate(long_request("0/0/0"))
        first = asyncio.ensure_future(anext(answer))
        await until_sampling(server)
        (job,) = server.core.jobs.values()
        await engine.pull(world.publish(1), world.channel)
        assert FinishReason.POLICY_CHANGED is (await first).finish_reason
        await answer.aclose()  # type: ignore[attr-defined]
        assert len(job.token_ids) == engine.num_sampled


async def test_a_sample_without_room_gives_its_place_back_though_nobody_listens_on(
    world: World,
) -> None:
    """Its only segment is empty."""
    world.serve()
    async with world.engine(limit=1) as engine:
        await engine.pull(world.publish(0), world.channel)
        (whole,) = await collect(engine, request(max_new_tokens=1))
        full = np.concatenate([PROMPT, whole.token_ids])
        wanted = request(token_ids=full, prompt_tokens=len(PROMPT), max_new_tokens=1)
        answer = engine.generate(wanted)
        assert FinishReason.LENGTH is (await anext(answer)).finish_reason
        await answer.aclose()  # type: ignore[attr-defined]
        assert await asyncio.wait_for(collect(engine, request("1/0/0")), 60.0)


async def test_requests_that_finish_first_take_nothing_of_a_pull_s_time(world: World) -> None:
    """Or a pull after samples that last longer than it may would never come to its bytes."""
    server = world.serve()
    pull_s = 2.0
    async with world.engine(on_pull=PauseMode.WAIT, pull_s=pull_s) as engine:
        await engine.pull(world.publish(0), world.channel)
        running = asyncio.create_task(collect(engine, long_request("0/0/0")))
        await until_sampling(server)
        pulling = asyncio.create_task(engine.pull(world.publish(1), world.channel))
        await asyncio.sleep(pull_s)  # what is to pass is the deadline itself
        server.core.holds = False
        assert 1 == (await pulling).policy_version
        assert {0} == {s.policy_version for s in await running}
