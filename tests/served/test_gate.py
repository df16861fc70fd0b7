"""No request leaves for a server whose weights are not known to be ours, whatever happened."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext

import pytest

from rlstreams.workers.engines.base import FinishReason, PauseMode
from rlstreams.workers.engines.served.engine import ServedEngine
from rlstreams.workers.model.base import EngineError
from rlstreams.workers.weights.channel import WeightError
from tests.contract.engine_rigs import collect, long_request, request, tokens
from tests.servers.fake_server import TELLING, VERSIONS, FakeServer
from tests.servers.world import World
from tests.waiting import until

LONG = "0/0/0"


async def until_sampling(server: FakeServer) -> None:
    """Until a request has a token; it stands still there until the next pause."""
    server.core.holds = True
    await until(lambda: any(j.token_ids for j in server.core.jobs.values()), "nothing is sampled")


async def until_passed_by(engine: ServedEngine, server: FakeServer) -> None:
    """Until a request waits, and went on waiting when the server was looked at again."""
    await until(lambda: bool(engine._num_waiting), "it does not wait")
    seen = server.heard["/health"]
    await until(lambda: server.heard["/health"] > seen + 1, "nobody looks")


@pytest.mark.parametrize("flavour", VERSIONS)
async def test_a_restarted_server_is_shut_until_it_pulled(world: World, flavour: str) -> None:
    """It answers at once, with random weights: nothing that it says then is asked for."""
    server = world.serve(flavour)
    async with world.engine() as engine:
        published = world.publish(0)
        await engine.pull(published, world.channel)
        server.kill()
        with pytest.raises(EngineError, match=server.url):
            await collect(engine, request())
        await until(lambda: engine.policy_version < 0, "still in service")
        assert not engine.wants(published)
        server.restart()
        await until(lambda: engine.wants(published), "not met again")
        early = asyncio.create_task(collect(engine, request()))
        await until_passed_by(engine, server)
        assert not server.core.jobs
        assert not early.done()
        await engine.pull(published, world.channel)
        assert {s.policy_version for s in await early} == {0}


async def test_a_pull_that_no_server_can_take_is_no_load(world: World) -> None:
    """One that was to pull may rest by then; `PolicyLoaded` is written of a load alone."""
    world.serve()
    async with world.engine() as engine:
        await engine.pull(world.publish(0), world.channel)
        published = world.publish(1)
        assert engine.wants(published)
        await engine.sleep()
        with pytest.raises(WeightError, match=r"version 1: no server can take it now: .* asleep"):
            await engine.pull(published, world.channel)


@pytest.mark.parametrize("flavour", VERSIONS)
async def test_a_pull_that_breaks_off_leaves_partial_segments(world: World, flavour: str) -> None:
    """Old weights may be damaged: what ran is cut at the pause, what waits goes on waiting."""
    server = world.serve(flavour)
    load = "/collective_rpc" if server.kind == "vllm" else "/update_weights_from_disk"
    async with world.engine() as engine:
        await engine.pull(world.publish(0), world.channel)
        running = asyncio.create_task(collect(engine, long_request(LONG)))
        await until_sampling(server)
        server.broken_routes[load] = 500
        with pytest.raises(WeightError, match="status 500"):
            await engine.pull(world.publish(1), world.channel)
        (partial,) = await running
        assert partial.finish_reason is FinishReason.ABORT
        assert partial.policy_version == 0
        assert 0 < len(partial.token_ids) < 110
        later = asyncio.create_task(collect(engine, request("1/0/0")))
        await until_passed_by(engine, server)
        assert engine.policy_version == -1
        assert not server.core.jobs
        server.broken_routes.clear()
        assert engine.wants(world.publish(1))
        await engine.pull(world.publish(1), world.channel)
        assert {s.policy_version for s in await later} == {1}


async def test_a_server_killed_in_the_middle_of_a_pull_comes_back_shut(world: World) -> None:
    """The pull fails, its requests end with an error, and the gate opens after the next pull."""
    server = world.serve()
    async with world.engine() as engine:
        await engine.pull(world.publish(0), world.channel)
        running = asyncio.create_task(collect(engine, long_request(LONG)))
        await until_sampling(server)
        server.dies_of_loading = True
        with pytest.raises(WeightError, match="connection failed"):
            await engine.pull(world.publish(1), world.channel)
        with pytest.raises(EngineError, match=server.url):
            await running
        await until(lambda: server.is_down, "not killed")
        server.restart()
        await until(lambda: engine.wants(world.publish(1)), "not met again")
        await engine.pull(world.publish(1), world.channel)
        assert {s.policy_version for s in await collect(engine, request())} == {1}


@pytest.mark.parametrize("flavour", VERSIONS)
@pytest.mark.parametrize("mode", list(PauseMode))
async def test_running_requests_while_weights_change(
    world: World, flavour: str, mode: PauseMode
) -> None:
    """They go on with a border, are cut, or finish first; no token has a wrong version."""
    server = world.serve(flavour)
    async with world.engine(on_pull=mode) as engine:
        await engine.pull(world.publish(0), world.channel)
        running = asyncio.create_task(collect(engine, long_request(LONG)))
        await until_sampling(server)
        (job,) = server.core.jobs.values()
        server.core.holds = mode is not PauseMode.WAIT
        pulled = await engine.pull(world.publish(1), world.channel)
        segments = await running
        told = [s.policy_version for s in segments for _ in s.token_ids]
        assert told == [num_loads - 1 for num_loads in job.loads]
        assert tokens(segments) == job.token_ids
        goes_on = mode is PauseMode.KEEP and flavour in TELLING
        assert sorted(set(told)) == ([0, 1] if goes_on else [0])
        is_cut = mode is not PauseMode.WAIT and not goes_on
        assert segments[-1].finish_reason == ("abort" if is_cut else "length")
        assert 0 <= pulled.paused_s <= pulled.seconds


async def test_a_prefix_of_old_weights_is_not_shared_with_new_ones(world: World) -> None:
    """Cached keys and values belong to one version: each request names its own."""
    server = world.serve()
    async with world.engine() as engine:
        for version in (0, 1):
            await engine.pull(world.publish(version), world.channel)
            await collect(engine, request())
        first, second = (body["cache_salt"] for body in server.asked)
        assert first.startswith("0-")
        assert second.startswith("1-")


async def test_an_old_version_of_a_server_is_refused_by_name(world: World) -> None:
    """Unless it is allowed: nobody ran these adapters with it."""
    world.serve().version = "0.24.0"
    async with world.engine(allow_untested=False) as engine:
        with pytest.raises(EngineError, match=r"vllm/0\.24\.0.*engine\.allow_untested = true"):
            await engine.pull(world.publish(0), world.channel)
        with pytest.raises(EngineError, match="vllm/0"):
            engine.wants(world.publish(0))  # the worker asks, and ends with the reason


@pytest.mark.parametrize(
    ("flavour", "why_not"),
    [
        ("sglang-0.5.17", ""),
        ("vllm-0.32.0", r"has no /update_weights: .* install vllm==0\.25\.1"),  # without plugin
    ],
)
async def test_a_newer_version_of_a_server_is_tried_if_it_has_every_route(
    world: World, flavour: str, why_not: str
) -> None:
    """One without a route that is needed is refused, with the version to install instead."""
    world.serve(flavour).version = "99.0"
    refused = pytest.raises(EngineError, match=why_not) if why_not else nullcontext()
    async with world.engine(allow_untested=False) as engine:
        with refused:
            await engine.pull(world.publish(0), world.channel)
