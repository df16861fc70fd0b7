"""A server whose processes weights cannot reach is refused when it is met, by flag and value."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from rlstreams.streams.log.errors import ConfigError
from rlstreams.workers.config.engine import EngineSection
from rlstreams.workers.engines.served.adapters import ADAPTERS, ask_facts
from rlstreams.workers.engines.served.check import Weight, check_server
from rlstreams.workers.engines.served.facts import Kind, Ranks
from rlstreams.workers.engines.served.http import ServerError, ServerHttp
from rlstreams.workers.engines.served.plugin_delivery import PluginDelivery
from rlstreams.workers.weights.report_listener import ReportListener
from tests.servers.world import World

ASK_S = 60.0
FLAVOURS = {"vllm-0.25.1": "--data-parallel-size 2", "sglang-0.5.17": "--dp-size 2"}


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_replicas_in_one_server_are_refused_when_it_is_met(world: World, flavour: str) -> None:
    """Not at its first pull, whose report would be missing for its whole deadline."""
    server, listener = world.serve(flavour), ReportListener()
    server.ranks, server.replicas = 4, 2

    async def meet() -> None:
        http = ServerHttp(server.url)
        facts = await ask_facts(http, ASK_S)
        adapter = ADAPTERS[facts.kind](http, facts, ASK_S)
        assert Ranks(total=4, replicas=2) == await adapter.ranks(ASK_S)
        delivery = PluginDelivery(listener, world.folder, world.folder, "0")
        try:
            await delivery.prepare(adapter)
        finally:
            await http.close()

    with pytest.raises(ServerError, match=f"{FLAVOURS[flavour]}: .*engine.urls"):
        asyncio.run(meet())
    listener.close()


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_a_check_says_what_weights_reach(world: World, flavour: str) -> None:
    """Replicas are broken, shards are well, and one process is not worth a line."""
    server, found = world.serve(flavour), []
    for server.ranks, server.replicas in ((4, 2), (2, 1), (1, 1)):
        rows = asyncio.run(check_server(server.url))
        found.append([(row.weight, row.found, row.cure) for row in rows if row.name == "ranks"])
    replicas, shards, single = found
    assert (Weight.BROKEN, True) == (replicas[0][0], FLAVOURS[flavour] in replicas[0][1])
    assert "engine.urls" in replicas[0][2]
    assert [(Weight.OK, "2, each gets its shard", "")] == shards
    assert [] == single


def test_stages_of_a_pipeline_are_named_too() -> None:
    """With the flag of the server's kind."""
    told = {kind: ADAPTERS[kind].refusal(Ranks(total=2, stages=2))[0] for kind in Kind}
    assert told[Kind.VLLM].startswith("--pipeline-parallel-size 2:")
    assert told[Kind.SGLANG].startswith("--pp-size 2:")


@pytest.mark.parametrize(
    ("args", "error"),
    [
        ({"data_parallel_size": 2}, "engine.args.data_parallel_size is 2: .*engine.urls"),
        ({"--dp-size": 4}, "engine.args.--dp-size is 4"),
        ({"pipeline-parallel-size": "2"}, "engine.args.pipeline-parallel-size is 2: .*tensor"),
    ],
)
def test_a_configuration_that_asks_for_them_is_refused(args: dict[str, Any], error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        EngineSection(args=args)
    assert EngineSection(args=dict.fromkeys(args, 1)).args == dict.fromkeys(args, 1)
