"""A router of vLLM or SGLang in front of servers: known by its answers, and refused by name."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rlstreams.check.doctor.check import EVERYTHING, Level
from rlstreams.check.doctor.engines import engine_checks
from rlstreams.workers.config.load import load
from rlstreams.workers.engines.served.check import Weight, check_server
from rlstreams.workers.model.base import EngineError
from tests.contract.engine_rigs import collect, driven, request
from tests.servers.fake_router import ROUTERS, FakeRouter, real_router
from tests.servers.fake_server import FakeServer
from tests.servers.served import engine_of_urls, holding, up
from tests.servers.world import World
from tests.unit.roles.stand import EXAMPLE
from tests.waiting import until

REAL = os.environ.get("RLSTREAMS_ROUTERS_PYTHON", "")  # of an environment with both packages
ORDERS = {"/pause", "/pause_generation", "/collective_rpc", "/update_weights_from_disk",
          "/generate", "/inference/v1/generate"}  # fmt: skip


@contextmanager
def router(kind: str, servers: list[FakeServer], *, is_real: bool) -> Iterator[str]:
    """The url of one in front of them."""
    if is_real:
        with real_router(REAL, kind, [server.url for server in servers]) as url:
            yield url
        return
    fake = FakeRouter(kind, servers)
    try:
        yield fake.url
    finally:
        fake.close()


def urls_in(cure: str) -> list[str]:
    """What `set engine.urls = [...]: ...` says is to be set."""
    line = cure.removeprefix("set ").partition("]: ")[0] + "]"
    named: list[str] = tomllib.loads(line)["engine"]["urls"]
    return named


@pytest.mark.parametrize(
    "is_real",
    [
        False,
        pytest.param(True, marks=pytest.mark.skipif(not REAL, reason="RLSTREAMS_ROUTERS_PYTHON")),
    ],
)
@pytest.mark.parametrize("kind", ROUTERS)
async def test_a_router_is_refused_and_its_servers_are_named(
    world: World, tmp_path: Path, kind: str, *, is_real: bool
) -> None:
    """By the doctor, before a start and by a worker; nothing is ordered through it; and the urls
    that the sentence names are a run's."""
    servers = [world.serve(ROUTERS[kind][0]) for _ in range(2)]
    with router(kind, servers, is_real=is_real) as url:
        (finding,) = await check_server(url)
        assert Weight.BROKEN == finding.weight
        assert f"server {url} is a router" in finding.found
        assert sorted(server.url for server in servers) == urls_in(finding.cure)
        engine = engine_of_urls(servers[0].kind, [url], tmp_path)
        await engine.start()
        with pytest.raises(EngineError, match=r"is a router.* set engine.urls = "):
            await engine.pull(world.publish(0), world.channel)
        await engine.close()
        assert not any(ORDERS & server.heard.keys() for server in servers)
    async with driven(
        engine_of_urls(servers[0].kind, urls_in(finding.cure), tmp_path, limit=1)
    ) as engine:
        await until(lambda: len(up(engine)) == 2, "one of them is not met")
        await engine.pull(world.publish(0), world.channel)
        of_both = urls_in(finding.cure)
        await until(lambda: sorted(holding(engine, 0)) == of_both, "one does not hold it")
        assert await collect(engine, request())


@pytest.mark.parametrize("kind", ROUTERS)
def test_a_run_is_not_started_on_a_router(world: World, tmp_path: Path, kind: str) -> None:
    servers = [world.serve(ROUTERS[kind][0]) for _ in range(2)]
    with router(kind, servers, is_real=False) as url:
        words = [f"run.dir={tmp_path}", f"rollout.engine={servers[0].kind}", "rollout.workers=1"]
        config = load([EXAMPLE], [*words, f'engine.urls=["{url}"]'])
        checks = list(engine_checks(config, EVERYTHING, has_model=True))
    (check,) = [check for check in checks if "is a router" in check.found]
    assert (Level.FAIL, "engine.urls") == (check.level, check.name)
    assert sorted(server.url for server in servers) == urls_in(check.advice)
