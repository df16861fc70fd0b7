"""When a server is in service: what it must answer, and who may listen at its address."""

from __future__ import annotations

import asyncio
import shutil

import pytest

from rlstreams.workers.weights.channel import WeightError
from tests.contract.engine_rigs import collect, request
from tests.servers.fake_server import VERSIONS
from tests.servers.served import up
from tests.servers.world import World
from tests.waiting import until

LONG_S = 60.0


@pytest.mark.parametrize("flavour", VERSIONS)
async def test_a_server_that_was_restarted_quickly_is_noticed(world: World, flavour: str) -> None:
    """Sooner than a silent one is given up: nobody listened, so its weights are gone."""
    server = world.serve(flavour)
    async with world.engine(silent_s=LONG_S) as engine:
        published = world.publish(0)
        await engine.pull(published, world.channel)
        server.kill()
        await until(lambda: not up(engine), "nobody noticed that nobody listens", LONG_S / 3)
        server.restart()
        await until(lambda: engine.wants(published), "it was not met again")
        await engine.pull(published, world.channel)
        assert await collect(engine, request())


async def test_a_vllm_whose_engine_core_is_dead_is_out_of_service(world: World) -> None:
    """Its front end still answers, with 503."""
    server = world.serve("vllm-0.32.0")
    async with world.engine(silent_s=3.0) as engine:
        await engine.pull(world.publish(0), world.channel)
        server.broken_routes["/health"] = 503
        await until(lambda: not up(engine), "still in service")


async def test_a_paused_sglang_stays_in_service(world: World) -> None:
    """It may answer 503 then."""
    server = world.serve("sglang-0.5.17")
    async with world.engine() as engine:
        await engine.pull(world.publish(0), world.channel)
        server.broken_routes["/health"] = 503
        seen = len(server.called)
        await engine.pull(world.publish(1), world.channel)
        assert len(server.called) > seen
        assert up(engine)


@pytest.mark.parametrize("flavour", VERSIONS)
async def test_a_proxy_in_front_of_a_starting_server_is_outwaited(
    world: World, flavour: str
) -> None:
    """A 503 of any route says later, not never."""
    server = world.serve(flavour)
    route = "/v1/models" if server.kind == "vllm" else "/server_info"
    server.broken_routes[route] = 503
    async with world.engine() as engine:
        published = world.publish(0)
        pull = asyncio.create_task(engine.pull(published, world.channel))
        await until(lambda: server.called.count(route) > 1, "it was given up at once")
        server.broken_routes.clear()
        assert 0 == (await pull).policy_version


async def test_a_version_that_cannot_be_written_leaves_the_old_one_in_service(world: World) -> None:
    """A full disk of the worker's: the server goes on, and is not left paused."""
    world.serve("vllm-0.25.1")
    async with world.engine() as engine:
        await engine.pull(world.publish(0), world.channel)
        shutil.rmtree(world.folder / "versions-0")
        (world.folder / "versions-0").write_text("in the way")
        with pytest.raises(WeightError, match="version 1 cannot be written to"):
            await engine.pull(world.publish(1), world.channel)
        assert {0} == {s.policy_version for s in await collect(engine, request())}
        (world.folder / "versions-0").unlink()
        await engine.pull(world.publish(1), world.channel)
        assert {1} == {s.policy_version for s in await collect(engine, request())}


async def test_versions_that_a_killed_predecessor_left_are_removed(world: World) -> None:
    """Each is as large as the model."""
    world.serve()
    left = world.folder / "versions-0" / "7-deadbeef"
    left.mkdir(parents=True)
    async with world.engine() as engine:
        await engine.pull(world.publish(0), world.channel)
        assert not left.exists()


async def test_a_number_with_another_content_is_pulled_again(world: World) -> None:
    """A trainer that had been replaced announced it first; the ledger says who is right."""
    world.serve()
    async with world.engine() as engine:
        void = world.publish(3)
        await engine.pull(void, world.channel)
        assert not engine.wants(void)
        world.weights.retire(0)
        right = world.publish_as(3, seed=4)
        assert engine.wants(right)
        await engine.pull(right, world.channel)
        hashes = {s.weight_hash for s in await collect(engine, request())}
        assert {right.weight_hash} == hashes
