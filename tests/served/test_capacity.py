"""A server's limit moves by what the server says of itself, over HTTP."""

from __future__ import annotations

import asyncio

import pytest

from rlstreams.workers.engines.served.capacity import AFTER_PULL, KEPT, START, Gauges
from rlstreams.workers.engines.served.engine import ServedEngine
from rlstreams.workers.engines.served.sglang import SglangAdapter
from rlstreams.workers.engines.served.vllm import VllmAdapter
from rlstreams.workers.engines.served.wire import AnswerError, gauges_of
from tests.contract.engine_rigs import collect, request
from tests.servers.served import up
from tests.servers.world import World
from tests.waiting import until

MOST = 100


async def sampled(engine: ServedEngine, number: int) -> None:
    await asyncio.gather(*(collect(engine, request(f"{i}/0/0")) for i in range(number)))


async def test_a_server_is_warmed_cut_and_warmed_anew(world: World) -> None:
    """Its limit grows by answers, falls when its counter of preemptions rises, and begins anew
    with a server that was started again; all of it is told."""
    server = world.serve("vllm-0.32.0")
    async with world.engine(limit=MOST, adapts=True, gauges_s=0.0) as engine:
        assert (engine.capacity, engine.max_capacity) == (START, MOST)
        await engine.pull(world.publish(0), world.channel)
        await sampled(engine, 300)
        capacity = engine._servers[0].requests.capacity
        assert engine.capacity > START
        await until(lambda: not capacity._num_passed, f"not looked at {AFTER_PULL} times")
        server.core.num_preemptions += 50
        before, server.core.holds = engine.capacity, True
        await until(lambda: capacity.num_preemptions == 50, "preemptions are not seen")
        (load,) = engine.server_loads
        assert (load.server, load.num_preemptions, load.why) == (server.url, 50, "preempted")
        assert 0.5 * before <= load.limit <= KEPT * before
        server.kill()
        await until(lambda: not up(engine), "it is not missed")
        server.restart()
        await until(lambda: bool(up(engine)), "it is not met")
        assert engine.capacity == START


async def test_a_full_cache_stops_growth(world: World) -> None:
    server = world.serve("sglang-0.5.23")
    server.core.cache_share = 0.95
    async with world.engine(limit=MOST, adapts=True, gauges_s=0.0) as engine:
        await engine.pull(world.publish(0), world.channel)
        capacity = engine._servers[0].requests.capacity
        await until(lambda: not capacity._may_grow, "its gauges are not read")
        await sampled(engine, 200)
        assert engine.capacity == START
        server.core.cache_share = 0.2
        await until(lambda: capacity._may_grow, "its gauges are not read")
        await sampled(engine, 200)
        assert engine.capacity > START


async def test_a_server_without_gauges_is_used_all_the_same(world: World) -> None:
    """SGLang that was started without `--enable-metrics`: asked once, and not again."""
    world.serve("sglang-0.5.17")
    async with world.engine(limit=MOST, adapts=True, gauges_s=0.0) as engine:
        await engine.pull(world.publish(0), world.channel)
        await until(lambda: bool(engine._monitors[0]._gauges_s), "not asked")
        await sampled(engine, 300)
        assert START < engine.capacity <= MOST
        assert engine._monitors[0]._gauges_s == float("inf")


VLLM, SGLANG = VllmAdapter.gauge_names, SglangAdapter.gauge_names


def test_gauges_of_several_engines_add_up() -> None:
    """Lines with labels, without, with a time, and of other metrics with a name that begins so."""
    page = """
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="a} b"} 3.0
vllm:num_requests_running{engine="1",model_name="a} b"} 4.0
vllm:num_requests_waiting 5 1790000000000
vllm:num_requests_waiting_by_reason{reason="capacity"} 9.0
vllm:kv_cache_usage_perc{engine="0"} 0.25
vllm:kv_cache_usage_perc{engine="1"} 5e-1
vllm:num_preemptions_total{engine="0"} 1.0
vllm:num_preemptions_total{engine="1"} 1.0
"""
    expected = Gauges(num_running=7, num_waiting=5, cache_share=0.5, num_preemptions=2)
    assert gauges_of(page, VLLM) == expected


@pytest.mark.parametrize(
    ("page", "said"),
    [
        ("", "there is no sglang:num_running_reqs, sglang:num_queue_reqs, sglang:token_usage"),
        ("sglang:num_running_reqs NaN", "sglang:num_running_reqs should be a number"),
        ("sglang:num_running_reqs{a=", "sglang:num_running_reqs should be a number"),
        ("sglang:num_queue_reqs", "sglang:num_queue_reqs should be a number"),
    ],
)
def test_a_page_without_them_is_refused(page: str, said: str) -> None:
    with pytest.raises(AnswerError, match=said):
        gauges_of(page, SGLANG)
