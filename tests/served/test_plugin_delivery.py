"""Delivery by the plugin in a server, as far as it can be told without one."""

from __future__ import annotations

import asyncio
import time

import pytest

from rlstreams.workers.engines.served.http import ServerHttp
from rlstreams.workers.engines.served.plugin_delivery import PluginDelivery
from rlstreams.workers.weights.report_listener import ReportListener, ServerPullError
from tests.servers.world import World
from tests.waiting import until

DEADLINE_S = 60.0
ORDER = {"deadline_s": DEADLINE_S, "policy_version": 7, "weight_hash": "ab"}


async def test_a_delivery_that_is_cancelled_waits_for_no_report(world: World) -> None:
    """A worker that ends in the middle of a pull would wait for the order's whole deadline."""
    server, listener = world.serve(), ReportListener()
    server.slow_routes["/update_weights"] = 2 * DEADLINE_S
    http = ServerHttp(server.url)
    delivery = PluginDelivery(listener, world.folder, world.folder, "0")
    with listener.open(ORDER, ranks=1) as pending:
        until_s = time.monotonic() + DEADLINE_S
        run = delivery._run(pending, http, [("/update_weights", {})], until_s, pending.wait)
        running = asyncio.create_task(run)
        await until(lambda: "/update_weights" in server.called, "not called")
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        with pytest.raises(ServerPullError, match="the worker ends"):
            pending.reports()
    await http.close()
    listener.close()
