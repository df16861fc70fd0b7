"""A server that shares its GPU: what becomes of one that dies asleep, or does not wake."""

from __future__ import annotations

import asyncio

import pytest

from rlstreams.schemas.events import NO_VERSION
from rlstreams.workers.engines.served.states import State
from tests.contract.engine_rigs import collect, request
from tests.servers.served import holding, up
from tests.servers.world import World
from tests.waiting import until

FLAVOURS = ("vllm-0.25.1", "sglang-0.5.17")


@pytest.mark.parametrize("flavour", FLAVOURS)
async def test_who_comes_up_while_its_role_rests_is_put_to_sleep(
    world: World, flavour: str
) -> None:
    """A server that died asleep and was started again has memory, and is to give it up at once."""
    server = world.serve(flavour)
    async with world.engine() as engine:
        published = world.publish(0)
        await engine.pull(published, world.channel)
        await engine.sleep()
        assert server.core.is_asleep
        assert not engine.wants(published)
        server.kill()
        await until(lambda: not up(engine), "not missed")
        server.restart()
        await until(lambda: server.core.is_asleep, "the new one keeps its memory")
        await engine.wake()
        assert (engine.policy_version, server.core.is_asleep) == (NO_VERSION, False)
        early = asyncio.create_task(collect(engine, request()))
        await until(lambda: engine.wants(published), "not back")
        await engine.pull(published, world.channel)
        assert {segment.policy_version for segment in await early} == {0}


@pytest.mark.parametrize("flavour", FLAVOURS)
async def test_who_is_falling_asleep_is_woken_once_it_sleeps(world: World, flavour: str) -> None:
    """Else it would sleep on, and be pulled to without memory."""
    server = world.serve(flavour)
    sleep, wake = {
        "vllm": ("/sleep", "/wake_up"),
        "sglang": ("/release_memory_occupation", "/resume_memory_occupation"),
    }[server.kind]
    async with world.engine() as engine:
        server.slow_routes[sleep] = 0.1
        falling = asyncio.create_task(engine.sleep())
        await until(lambda: server.called[-1:] and sleep in server.called[-1], "not told to")
        await engine.wake()
        assert wake in server.called[-1]
        falling.cancel()
        await engine.pull(world.publish(0), world.channel)
        assert {segment.policy_version for segment in await collect(engine, request())} == {0}


@pytest.mark.parametrize("flavour", FLAVOURS)
async def test_who_does_not_wake_is_not_taken_for_asleep(world: World, flavour: str) -> None:
    """Else its next sleep would be over at once, while it comes up again with all its memory."""
    server = world.serve(flavour)
    async with world.engine() as engine:
        await engine.pull(world.publish(0), world.channel)
        assert engine.is_up
        await engine.sleep()
        server.kill()
        await engine.wake()
        assert not engine.is_up
        assert State.ASLEEP not in engine.servers.values()


@pytest.mark.parametrize("flavour", FLAVOURS)
async def test_all_servers_of_a_worker_rest_in_one_shift(world: World, flavour: str) -> None:
    """The shift is over once the last has no memory; each wakes at no version, and is pulled by."""
    servers = [world.serve(flavour) for _ in range(3)]
    async with world.engine() as engine:
        await engine.pull(world.publish(0), world.channel)
        await until(lambda: len(up(engine)) == 3, "not all up")
        await engine.sleep()
        assert [True] * 3 == [server.core.is_asleep for server in servers]
        await engine.wake()
        assert [False] * 3 == [server.core.is_asleep for server in servers]
        assert NO_VERSION == engine.policy_version
        published = world.publish(1)
        await until(lambda: engine.wants(published), "not back")
        await engine.pull(published, world.channel)
        await until(lambda: len(holding(engine, 1)) == 3, "one was not pulled by")
        await asyncio.gather(*(collect(engine, request(f"{n}/0/0")) for n in range(6)))
