"""A worker that was killed or suspended: what its successor finds, and what of it is refused."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from rlstreams.schemas.events import NO_VERSION
from rlstreams.workers.engines.served.engine import ServedEngine
from rlstreams.workers.engines.served.plugin_delivery import PluginDelivery
from rlstreams.workers.engines.served.server_client import ServerClient
from rlstreams.workers.engines.served.shape import longest_sequence, read_shape
from rlstreams.workers.weights.channel import WeightError
from rlstreams.workers.weights.report_listener import ReportListener
from tests.contract.engine_rigs import collect, driven, long_request, request
from tests.served.test_gate import until_sampling
from tests.servers.fake_server import FakeServer
from tests.servers.served import STAND_IN_BEAT_S, model_folder, settings, up
from tests.servers.world import World
from tests.waiting import until

FLAVOURS = ("vllm-0.25.1", "sglang-0.5.17")
LONG_S = 60.0


@pytest.fixture
def listener() -> Iterator[ReportListener]:
    made = ReportListener()
    yield made
    made.close()


def engine_of(
    world: World, server: FakeServer, listener: ReportListener, instance: str
) -> ServedEngine:
    """Of one process of a rollout worker."""
    model, chosen = model_folder(world.folder), settings(server.kind, beat_s=STAND_IN_BEAT_S)
    shape = read_shape(model)
    versions = world.folder / instance
    delivery = PluginDelivery(listener, model, versions, "0", instance=instance, probe_s=LONG_S)
    one = ServerClient(server.url, chosen, shape, delivery, instance=instance)
    return ServedEngine(chosen, shape, longest_sequence(model), [one])


@pytest.mark.parametrize("flavour", FLAVOURS)
async def test_a_successor_uses_the_same_server_once_it_has_pulled(
    world: World, listener: ReportListener, flavour: str
) -> None:
    """What the dead worker asked is ended, what it loaded does not count, nothing is restarted."""
    server = world.serve(flavour, has_plugin=True)
    async with driven(engine_of(world, server, listener, "first")) as first:
        await first.pull(world.publish(5), world.channel)
        lost = asyncio.create_task(collect(first, long_request("0/0/0")))
        await until_sampling(server)
        async with driven(engine_of(world, server, listener, "second")) as second:
            await until(lambda: bool(up(second)), "not met")
            assert any("pause" in path for path in server.called)
            await until(lambda: not server.core.jobs, "what the dead one asked runs on")
            assert NO_VERSION == second.policy_version
            early = asyncio.create_task(collect(second, request()))
            published = world.publish(6)
            assert second.wants(published)
            assert not early.done()
            await second.pull(published, world.channel)
            assert {6} == {segment.policy_version for segment in await early}
            assert 2 == server.core.num_loads
        lost.cancel()
        await asyncio.gather(lost, return_exceptions=True)


@pytest.mark.parametrize("flavour", FLAVOURS)
async def test_orders_of_a_zombie_are_refused_by_the_plugin(
    world: World, listener: ReportListener, flavour: str
) -> None:
    """It woke up after its successor had met the server: it loads nothing, and is told by whom."""
    server = world.serve(flavour, has_plugin=True)
    async with driven(engine_of(world, server, listener, "zombie-1")) as zombie:
        await zombie.pull(world.publish(0), world.channel)
        async with driven(engine_of(world, server, listener, "heir-1")) as heir:
            await heir.pull(world.publish(1), world.channel)
            loads, table = server.core.num_loads, server.core.table.clone()
            with pytest.raises(
                WeightError, match="process zombie-1, but this server was claimed by heir-1"
            ):
                await zombie.pull(world.publish(2), world.channel)
            assert loads == server.core.num_loads
            assert server.core.table.equal(table)
            # It called the weights by its own name for the version that it held, as it went on.
            await heir.pull(world.publish(3), world.channel)
            assert {3} == {s.policy_version for s in await collect(heir, request())}


async def test_what_a_zombie_calls_the_weights_is_nothing_that_its_successor_knows(
    world: World, listener: ReportListener
) -> None:
    """It was suspended between a load and its naming: the name says a version, and whose it is."""
    server = world.serve("vllm-0.25.1", has_plugin=True)
    async with driven(engine_of(world, server, listener, "zombie-1")) as zombie:
        await zombie.pull(world.publish(0), world.channel)
        name = server.core.label
        async with driven(engine_of(world, server, listener, "heir-1")) as heir:
            await heir.pull(world.publish(0), world.channel)
            assert {0} == {s.policy_version for s in await collect(heir, request())}
            await heir.pull(world.publish(1), world.channel)
            server.core.label = name
            with pytest.raises(Exception, match="tokens come from version"):
                await collect(heir, request())
            assert NO_VERSION == heir.policy_version
