"""A server that hangs in a pull and answers looks at its health all the same."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from rlstreams.workers.engines.base import FinishReason
from rlstreams.workers.engines.served.engine import ServedEngine
from rlstreams.workers.model.base import EngineError
from rlstreams.workers.weights import report_listener
from rlstreams.workers.weights.channel import WeightError
from rlstreams.workers.weights.report_listener import ReportListener
from tests.contract.engine_rigs import collect, driven, long_request, request
from tests.served.test_gate import until_sampling
from tests.servers.served import plugin_engine, up
from tests.servers.world import World
from tests.waiting import until

FLAVOURS = ("vllm-0.32.0", "sglang-0.5.17")
LONG_S = 60.0
SHORT_S = 0.5  # of what is known to hang, and of what comes before

# Who hears it first: the pull, or the looks at an engine behind a front end that answers.
SILENT = ("does not answer since", "engine did not answer")


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    yield made
    made.close()


@pytest.fixture
def listener(monkeypatch: pytest.MonkeyPatch) -> Iterator[ReportListener]:
    monkeypatch.setattr(report_listener, "REPORT_GRACE_S", LONG_S)
    made = ReportListener()
    yield made
    made.close()


@pytest.mark.parametrize("has_plugin", [True, False])
@pytest.mark.parametrize("flavour", FLAVOURS)
async def test_a_running_server_that_hangs_is_shut_and_named(
    world: World, listener: ReportListener, flavour: str, has_plugin: bool
) -> None:
    """Its requests end with an error, it takes no pull by whatever way, until somebody restarts
    it."""
    server = world.serve(flavour, has_plugin=has_plugin)
    async with driven(plugin_engine(server, listener, world.folder, probe_s=LONG_S)) as engine:
        way = engine._monitors[0].server
        await engine.pull(world.publish(0), world.channel)
        assert way.delivery_name.startswith("plugin" if has_plugin else "folder")
        running = asyncio.create_task(collect(engine, long_request("0/0/0")))
        await until_sampling(server)
        server.hangs_of_loading = True
        hurry(engine)
        with pytest.raises(WeightError):
            await engine.pull(world.publish(1), world.channel)
        if flavour.startswith("sglang"):  # names no versions, so its answers are cut at the pause
            assert FinishReason.ABORT == (await running)[-1].finish_reason
        else:
            with pytest.raises(EngineError, match="|".join(SILENT)):
                await running
        await until(lambda: not up(engine), "still in service")
        assert not engine.wants(world.publish(1))
        assert server.url in engine.trouble
        assert re.search(f"a pull broke off, and it {SILENT[0]}|{SILENT[1]}", engine.trouble)
        looks = server.heard["/health"]
        await until(lambda: server.heard["/health"] > looks + 1, "it is not looked at")
        assert not up(engine)
        server.kill()
        server.restart()
        hurry(engine, LONG_S)
        await until(lambda: engine.wants(world.publish(1)), "not met again")
        await engine.pull(world.publish(1), world.channel)
        assert way.delivery_name.startswith("plugin" if has_plugin else "folder")
        assert "" == engine.trouble
        assert {1} == {s.policy_version for s in await collect(engine, request())}


def hurry(engine: ServedEngine, deadline_s: float = SHORT_S) -> None:
    """What is asked of a server that is known to hang need not take long."""
    monitor = engine._monitors[0]
    monitor._settings = replace(monitor._settings, silent_s=deadline_s)
    server = monitor.server
    server._settings = replace(
        server._settings, pull_s=deadline_s, answer_s=deadline_s, silent_s=deadline_s
    )
    server._delivery._probe_s = deadline_s
    if server.adapter is not None:
        server.adapter._answer_s = deadline_s
    report_listener.REPORT_GRACE_S = deadline_s
