"""Which server a request goes to."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from rlstreams.schemas.events import PolicyPublished
from rlstreams.workers.engines.base import sampled_by
from rlstreams.workers.engines.served.capacity import SLACK, Candidate, choose
from rlstreams.workers.engines.served.engine import ServedEngine
from rlstreams.workers.model.base import EngineError
from tests.contract.engine_rigs import collect, request
from tests.contract.engine_waits import num_running, num_waiting
from tests.servers.served import holding, up
from tests.servers.world import World
from tests.waiting import until

LIMIT = 64


def chosen(in_flight: Sequence[int], num_groups: int, limit: int = LIMIT) -> list[str | None]:
    """The servers of as many groups."""
    loads = {f"s{i}": Candidate(number, limit) for i, number in enumerate(in_flight)}
    return [choose(str(group), loads) for group in range(num_groups)]


def test_a_group_stays_together() -> None:
    """Siblings go where the prompt is cached; groups spread over the servers."""
    found = chosen((0, 0, 0), 300)
    assert found == chosen((3, 1, 2), 300)
    assert all(70 < found.count(url) < 130 for url in ("s0", "s1", "s2"))


def test_a_server_that_goes_moves_only_its_own_groups() -> None:
    before, after = chosen((0, 0, 0), 200), chosen((0, 0), 200)
    assert all(a == b for a, b in zip(before, after, strict=True) if b != "s2" and a != "s2")


def test_affinity_ends_where_one_server_is_much_busier() -> None:
    """Least in flight goes before a cached prefix."""
    assert set(chosen((0, SLACK + 1), 50)) == {"s0"}


def test_nobody_is_given_more_than_its_limit() -> None:
    """Full servers are passed by; if all are full, or none is open, the request waits."""
    assert set(chosen((4, 3), 50, limit=4)) == {"s1"}
    assert [None, None] == chosen((4, 4), 1, limit=4) + chosen((), 1)


async def test_a_full_server_takes_no_more_than_its_limit(world: World) -> None:
    """Requests beyond it wait in the worker, in order."""
    server = world.serve()
    async with world.engine(limit=2) as engine:
        await engine.pull(world.publish(0), world.channel)
        server.core.holds = True
        tasks = [asyncio.create_task(collect(engine, request(f"{i}/0/0"))) for i in range(9)]
        await until(lambda: bool(server.core.jobs), "nothing runs")
        assert (num_running(engine), num_waiting(engine)) == (2, 7)
        server.core.holds = False
        most = 0
        while not all(task.done() for task in tasks):
            most = max(most, len(server.core.jobs))
            await asyncio.sleep(0)
        assert most <= 2


async def test_an_answer_names_the_server_that_sampled_it(world: World) -> None:
    """So a fault of one of several can be told from the log."""
    servers = [world.serve() for _ in range(2)]
    async with world.engine() as engine:
        await _all_hold(engine, world.publish(0), world, 2)
        answers = [await collect(engine, request(f"{i}/0/0")) for i in range(12)]
    found = {sampled_by("engine", segments) for segments in answers}
    assert found == {f"engine at {server.url}" for server in servers}
    assert sampled_by("builtin/1", []) == "builtin/1"


async def test_a_session_stays_where_its_turns_are(world: World) -> None:
    """Also one that was given to another server than its group's, while that one was full."""
    servers = [world.serve() for _ in range(2)]
    async with world.engine(limit=1) as engine:
        await _all_hold(engine, world.publish(0), world, 2)
        first = (await collect(engine, replace(request("7/0/0"), session="7/0")))[0].server
        theirs = next(server for server in servers if server.url == first)
        theirs.core.holds = True
        held = asyncio.create_task(collect(engine, request("7/1/0")))
        await until(lambda: bool(theirs.core.jobs), "nothing runs there")
        second = (await collect(engine, replace(request("7/2/0"), session="7/2")))[0].server
        theirs.core.holds = False
        await held
        assert second != first
        for turn in range(3):  # its group's server has room again
            again = await collect(engine, replace(request(f"7/2/{turn}"), session="7/2"))
            assert again[0].server == second


async def test_work_of_a_dead_server_goes_to_the_others(world: World) -> None:
    """Its requests end with an error that names it; asked again, they are answered elsewhere."""
    servers = [world.serve() for _ in range(3)]
    async with world.engine() as engine:
        await _all_hold(engine, world.publish(0), world, 3)
        servers[0].core.holds = True
        ids = [f"{i}/0/0" for i in range(36)]  # some of so many go there, whatever its port
        tasks = {sample_id: asyncio.create_task(_ask(engine, sample_id)) for sample_id in ids}
        await until(lambda: bool(servers[0].core.jobs), "nothing runs there")
        servers[0].kill()
        results = dict(zip(tasks, await asyncio.gather(*tasks.values()), strict=True))
        lost = [sample_id for sample_id, error in results.items() if error]
        assert lost
        assert all(servers[0].url in results[sample_id] for sample_id in lost)
        assert [await _ask(engine, sample_id) for sample_id in lost] == [""] * len(lost)
        assert engine.policy_version == 0


async def test_a_slow_pull_of_one_server_keeps_nobody_waiting(world: World) -> None:
    """New requests go to those that hold the newest version, and to no other."""
    servers = [world.serve(), world.serve()]
    async with world.engine() as engine:
        await _all_hold(engine, world.publish(0), world, 2)
        servers[1].slow_routes["/collective_rpc"] = 60.0
        await engine.pull(world.publish(1), world.channel)
        assert engine.policy_version == 1
        results = [await collect(engine, request(f"{i}/0/0")) for i in range(6)]
        assert {s.policy_version for segments in results for s in segments} == {1}
        assert not servers[1].asked


async def test_no_request_goes_back_to_an_older_version(world: World) -> None:
    """When the only server with the newest version dies, the others are shut until they have it."""
    servers = [world.serve(), world.serve()]
    async with world.engine() as engine:
        await _all_hold(engine, world.publish(0), world, 2)
        servers[1].broken_routes["/pause"] = 500
        await engine.pull(world.publish(1), world.channel)
        assert engine.policy_version == 1
        servers[0].kill()
        await until(lambda: engine.policy_version == -1, "an older version is in service")
        servers[1].broken_routes.clear()
        published = world.publish(1)
        await until(lambda: engine.wants(published), "its pull that failed has not ended")
        await engine.pull(published, world.channel)
        assert {s.policy_version for s in await collect(engine, request())} == {1}


async def _all_hold(
    engine: ServedEngine, published: PolicyPublished, world: World, num: int
) -> None:
    """Until each of the servers holds it: `pull` returns when the first one does."""
    await until(lambda: len(up(engine)) == num, "not all are up")
    await engine.pull(published, world.channel)
    await until(lambda: len(holding(engine, published.policy_version)) == num, "not all hold it")


async def _ask(engine: ServedEngine, sample_id: str) -> str:
    try:
        await collect(engine, request(sample_id, max_new_tokens=40))
    except EngineError as err:
        return str(err)
    return ""
