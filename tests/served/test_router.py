"""A router in front: it picks the server, and the promises about versions hold all the same."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from rlstreams.schemas.events import PolicyPublished
from rlstreams.streams.log.errors import ConfigError
from rlstreams.workers.bootstrap.served import router_of
from rlstreams.workers.config.run import EngineSection, RolloutSection, RunConfig
from rlstreams.workers.engines.served.engine import ServedEngine
from rlstreams.workers.model.base import EngineError
from tests.contract.engine_rigs import collect, request, tokens
from tests.servers.fake_router import FakeRouter
from tests.servers.fake_server import FakeServer
from tests.servers.served import up
from tests.servers.world import World
from tests.waiting import until

GENERATE = "/inference/v1/generate"
LONG_S = 60.0


@pytest.fixture
def servers(world: World) -> list[FakeServer]:
    return [world.serve(), world.serve()]


@pytest.fixture
def router(servers: list[FakeServer]) -> Iterator[FakeRouter]:
    made = FakeRouter([server.url for server in servers])
    yield made
    made.close()


async def held_by_all(engine: ServedEngine, world: World, version: int = 0) -> PolicyPublished:
    """Both are met, and have pulled; nothing more is needed for requests to leave."""
    await until(lambda: len(up(engine)) == 2, "one is not met", LONG_S)
    published = world.publish(version)
    await engine.pull(published, world.channel)
    await until(engine._are_equal, "one has not pulled", LONG_S)
    return published


def test_requests_go_through_it_and_control_calls_to_each_server(
    world: World, servers: list[FakeServer], router: FakeRouter
) -> None:
    """Pulls, pauses, labels: none of them is left to a router's choice."""

    async def scenario(engine: ServedEngine) -> None:
        await held_by_all(engine, world)
        answers = [await collect(engine, request(f"{i}/0/0")) for i in range(4)]
        assert {0} == {s.policy_version for segments in answers for s in segments}
        await held_by_all(engine, world, 1)
        assert {1} == {s.policy_version for s in await collect(engine, request("9/0/0"))}

    world.run(scenario, router=router.url, silent_s=LONG_S)
    assert {GENERATE} == set(router.asked)
    assert 5 == len(router.asked) == sum(len(server.asked) for server in servers)
    assert all(server.asked for server in servers)
    for server in servers:
        routes = [path.partition("?")[0] for path in server.called]
        assert [3, 2] == [  # asked for records, and told to load twice
            routes.count("/collective_rpc"),
            routes.count("/update_weight_version"),
        ]


def test_no_request_leaves_before_all_hold_the_same_version(
    world: World, servers: list[FakeServer], router: FakeRouter
) -> None:
    """The router could pick the one that is still in the middle of its pull."""

    async def scenario(engine: ServedEngine) -> None:
        await held_by_all(engine, world)
        servers[1].slow_routes["/collective_rpc"] = LONG_S
        pull = asyncio.create_task(engine.pull(world.publish(1), world.channel))
        await until(lambda: engine.policy_version == 1, "the first has not pulled", LONG_S)
        early = asyncio.create_task(collect(engine, request("1/0/0")))
        await until(lambda: bool(engine._num_waiting), "it does not wait", LONG_S)
        assert [] == router.asked
        early.cancel()
        pull.cancel()
        await asyncio.gather(early, pull, return_exceptions=True)

    world.run(scenario, router=router.url, silent_s=LONG_S, pull_s=LONG_S)


def test_an_answer_of_weights_that_are_not_ours_is_refused(
    world: World, servers: list[FakeServer], router: FakeRouter
) -> None:
    """A server that came back with random weights before anybody noticed, or a stranger."""

    async def scenario(engine: ServedEngine) -> None:
        await held_by_all(engine, world)
        for server in servers:
            server.core.label = "default"
        with pytest.raises(EngineError, match="default"):
            await collect(engine, request("1/0/0"))

    world.run(scenario, router=router.url, silent_s=LONG_S)


def test_a_dead_server_shuts_all_until_it_is_back(
    world: World, servers: list[FakeServer], router: FakeRouter
) -> None:
    """It comes back with random weights, which the router would ask."""

    async def scenario(engine: ServedEngine) -> None:
        published = await held_by_all(engine, world)
        await asyncio.to_thread(servers[1].kill)
        await until(lambda: servers[1].url not in up(engine), "its death was not seen", LONG_S)
        early = asyncio.create_task(collect(engine, request("1/0/0")))
        await until(lambda: bool(engine._num_waiting), "it does not wait", LONG_S)
        assert [] == router.asked
        await asyncio.to_thread(servers[1].restart)
        await until(lambda: servers[1].url in up(engine), "it is not met again", LONG_S)
        assert not early.done()
        while not early.done():  # as a worker does: a busy machine may lose one more
            if engine.wants(published):
                await engine.pull(published, world.channel)
            await asyncio.sleep(0.01)
        assert tokens(await early)

    world.run(scenario, router=router.url)


def test_a_server_that_names_no_versions_cannot_stand_behind_one(world: World) -> None:
    """Which server answered, and so which version, would be a guess."""
    server = world.serve("vllm-0.25.1")
    server.keeps_records = False

    async def scenario(engine: ServedEngine) -> None:
        with pytest.raises(EngineError, match=r"vllm/0\.25\.1 behind router http.* clear engine"):
            await engine.pull(world.publish(0), world.channel)

    world.run(scenario, router="http://127.0.0.1:1")
    assert [] == server.asked


def test_each_worker_has_a_router_of_its_own() -> None:
    """Servers are dealt out to workers, so routers are too."""
    urls, routers = ("http://a:1", "http://b:1"), ("http://r:1", "http://r:2")
    config = RunConfig(
        rollout=RolloutSection(workers=2), engine=EngineSection(urls=urls, routers=routers)
    )
    found = [router_of(config, ordinal) for ordinal in range(2)]
    assert list(routers) == [router.url for router in found if router is not None]
    assert router_of(RunConfig(), 0) is None
    one = RunConfig(rollout=RolloutSection(workers=2), engine=EngineSection(urls=urls))
    assert router_of(one, 1) is None


@pytest.mark.parametrize(
    ("engine", "workers", "reason"),
    [
        ({"urls": ("http://a:1",), "routers": ("http://r:1",)}, 2, "1 routers for 2 rollout"),
        ({"routers": ("http://r:1",)}, 1, "engine.urls is empty"),
        ({"urls": ("http://a:1",), "routers": ("r",)}, 1, "engine.routers must be like"),
    ],
)
def test_a_router_that_cannot_be_is_refused(
    engine: dict[str, tuple[str, ...]], workers: int, reason: str
) -> None:
    """By field, with what to do."""
    with pytest.raises(ConfigError, match=reason):
        router_of(
            RunConfig(rollout=RolloutSection(workers=workers), engine=EngineSection(**engine)), 0
        )
