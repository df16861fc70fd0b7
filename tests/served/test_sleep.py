"""A server that shares its GPU: what it must be able to do, and what becomes of one that dies."""

from __future__ import annotations

import asyncio

import pytest

from rlstreams.schemas.events import NO_VERSION
from rlstreams.workers.engines.served.engine import ServedEngine
from rlstreams.workers.model.base import EngineError
from tests.contract.engine_rigs import collect, request
from tests.servers.served import up
from tests.servers.world import World
from tests.waiting import until

FLAVOURS = ("vllm-0.25.1", "sglang-0.5.17")


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_a_server_that_cannot_sleep_is_refused_by_name(world: World, flavour: str) -> None:
    """Its routes are there all the same, and would free nothing."""
    server = world.serve(flavour)
    server.can_sleep = False
    flag = "--enable-sleep-mode" if server.kind == "vllm" else "--enable-memory-saver"

    async def scenario(engine: ServedEngine) -> None:
        with pytest.raises(EngineError, match=f"was started without {flag}, but its role shares"):
            await engine.pull(world.publish(0), world.channel)

    world.run(scenario, must_sleep=True)


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_who_comes_up_while_its_role_rests_is_put_to_sleep(world: World, flavour: str) -> None:
    """A server that died asleep and was started again has memory, and is to give it up at once."""
    server = world.serve(flavour)

    async def scenario(engine: ServedEngine) -> None:
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

    world.run(scenario)
