"""A server's answer without end, and a server that answers looks and nothing else."""

from __future__ import annotations

import asyncio
import time
import tracemalloc
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from rlstreams.workers.engines.base import Held
from rlstreams.workers.engines.served.http import LONGEST_BYTES, ServerError, ServerHttp
from rlstreams.workers.engines.served.running import generate_request, longest_answer
from rlstreams.workers.engines.served.shape import read_shape
from rlstreams.workers.engines.served.states import State
from rlstreams.workers.model.base import EngineError
from tests.contract.engine_rigs import collect, long_request, request
from tests.servers.fake_server import VERSIONS
from tests.servers.served import model_folder, settings
from tests.servers.world import World
from tests.waiting import until

MB = 1 << 20


@asynccontextmanager
async def endless() -> Any:
    """A server whose every answer goes on; its address, and how many bytes left."""
    sent = [0]

    async def pour(asked: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse(headers={"Content-Type": "application/json"})
        await answer.prepare(asked)
        while True:
            await answer.write(b"[" * MB)
            sent[0] += MB

    app = web.Application()
    app.router.add_route("*", "/{any:.*}", pour)
    runner = web.AppRunner(app, shutdown_timeout=0.01)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = site._server.sockets[0].getsockname()[1]  # type: ignore[union-attr]
    yield f"http://127.0.0.1:{port}", sent
    await runner.cleanup()


@pytest.mark.parametrize("longest", [MB, 3 * MB])
async def test_an_answer_is_read_as_far_as_was_asked_for(longest: int) -> None:
    """Not its 9 GB: the connection is closed, and the message says what was expected of whom."""
    async with endless() as (url, sent):
        http = ServerHttp(url)
        tracemalloc.start()
        try:
            with pytest.raises(
                ServerError, match=rf"{url}: request 7: the answer is longer than {longest:,} bytes"
            ):
                await http.post("/generate", {}, 60.0, what="request 7", longest_bytes=longest)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
            await http.close()
        assert sent[0] < longest + 32 * MB  # what buffers of both ends take
        assert peak < 2 * longest + 32 * MB


async def test_what_a_server_says_of_itself_has_an_end_too() -> None:
    async with endless() as (url, _):
        http = ServerHttp(url)
        try:
            with pytest.raises(ServerError, match=f"longer than {LONGEST_BYTES:,} bytes"):
                await http.get("/openapi.json", 60.0)
        finally:
            await http.close()


@pytest.mark.parametrize("flavour", VERSIONS)
async def test_no_answer_of_a_server_that_works_is_too_long(world: World, flavour: str) -> None:
    """The bound is some times what the longest answer takes, experts of each position included."""
    server = world.serve(flavour)
    sizes = []
    async with world.engine() as engine:
        http = engine._servers[0].http
        await engine.pull(world.publish(0), world.channel)
        ask = http.post

        async def post(*args: Any, longest_bytes: int = 0, **more: Any) -> Any:
            found = await ask(*args, longest_bytes=longest_bytes, **more)
            sizes.append((len(repr(found)), longest_bytes))
            return found

        http.post = post  # type: ignore[method-assign]
        assert await collect(engine, long_request("0/0/0"))
    ((size, longest),) = [one for one in sizes if one[1]]
    shape = read_shape(model_folder(world.folder))
    asked = generate_request(
        long_request("0/0/0"), settings(server.kind), shape, 10**6, Held().label
    )
    assert longest <= longest_answer(asked, shape)
    assert 4 * size < longest - MB


@pytest.mark.parametrize("flavour", VERSIONS)
async def test_a_server_that_answers_health_and_nothing_else_is_given_up(
    world: World, flavour: str
) -> None:
    """After `silent_s`, not after the longest request; its requests are asked elsewhere."""
    server = world.serve(flavour)
    async with world.engine(inside_s=0.05, silent_s=0.3, look_s=1.0) as engine:
        await engine.pull(world.publish(0), world.channel)
        assert await collect(engine, request())
        running = asyncio.create_task(collect(engine, request()))
        server.is_stuck = True
        await until(lambda: engine.servers[server.url] == State.HUNG, "still in service")
        if not running.done() or running.exception():
            with pytest.raises(EngineError, match=server.url):
                await running
        assert "its engine did not answer for 0.3 s" in engine.trouble
        assert not engine.is_up
        server.kill()
        await until(lambda: engine.servers[server.url] == State.LOST, "its end is not seen")
        server.restart()
        published = world.publish(1)
        await until(lambda: engine.wants(published), "not met again")
        await engine.pull(published, world.channel)
        assert {1} == {s.policy_version for s in await collect(engine, request())}


async def test_an_engine_may_compile_before_its_first_answer(world: World) -> None:
    """For longer than it may be silent later, but not for ever; and again when it was restarted."""
    server = world.serve(VERSIONS[0])
    async with world.engine(inside_s=0.05, silent_s=0.3, look_s=1.0) as engine:
        await engine.pull(world.publish(0), world.channel)
        server.is_stuck = True
        await asyncio.sleep(3 * 0.3)
        assert engine.is_up
        server.is_stuck = False
        assert await collect(engine, request())
        server.kill()
        await until(lambda: engine.servers[server.url] == State.LOST, "its end is not seen")
        server.restart()
        published = world.publish(1)
        await until(lambda: engine.wants(published), "not met again")
        await engine.pull(published, world.channel)
        server.is_stuck = True
        began_s = time.monotonic()
        await until(lambda: engine.servers[server.url] == State.HUNG, "still in service")
        assert time.monotonic() - began_s > 3 * 0.3
        assert "its engine did not answer for 1.8 s" in engine.trouble
