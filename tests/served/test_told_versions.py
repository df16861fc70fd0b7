"""Each token is told under the version that sampled it, whatever became of the pulls meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from rlstreams.workers.engines.base import FinishReason, GeneratedSegment
from rlstreams.workers.engines.served.engine import ServedEngine
from rlstreams.workers.engines.served.running import Running
from rlstreams.workers.engines.served.server_client import ServerClient
from rlstreams.workers.engines.served.wire import Answer
from rlstreams.workers.model.base import EngineError
from rlstreams.workers.weights.channel import WeightError
from tests.contract.engine_rigs import collect, long_request, tokens
from tests.served.test_gate import until_sampling
from tests.servers.fake_server import TELLING, FakeServer
from tests.servers.markov import Job
from tests.servers.served import up
from tests.servers.world import World
from tests.waiting import until

LONG = "0/0/0"
STEP_S = 0.001  # slow enough to be stopped in the middle


def pause_route(server: FakeServer) -> str:
    return "/pause" if server.kind == "vllm" else "/pause_generation"


def resume_route(server: FakeServer) -> str:
    return "/resume" if server.kind == "vllm" else "/continue_generation"


def told(segments: Sequence[GeneratedSegment]) -> list[int]:
    return [segment.policy_version for segment in segments for _ in segment.token_ids]


def sampled(job: Job) -> list[int]:
    """What the server itself knows: version v is what it loaded as its (v + 1)th."""
    return [num_loads - 1 for num_loads in job.loads]


async def until_longer(job: Job, server: FakeServer) -> None:
    """Until a few tokens more are there; it stands still until the next pause then, however late
    this looks, and what is left is sampled as fast as it goes."""
    core = server.core
    if not core.holds:
        core.holds, core.holds_at = True, len(job.token_ids) + 3
    await until(lambda: len(job.token_ids) >= core.holds_at, "nothing more is sampled")
    core.more, core.step_s = 0, 0.0


async def begun(
    engine: ServedEngine, world: World, server: FakeServer
) -> tuple[asyncio.Task[list[GeneratedSegment]], Job]:
    """A request that version 0 began and version 1 goes on with."""
    await engine.pull(world.publish(0), world.channel)
    running = asyncio.create_task(collect(engine, long_request(LONG)))
    await until_sampling(server)
    (job,) = server.core.jobs.values()
    server.core.more = 3
    await engine.pull(world.publish(1), world.channel)
    await until_longer(job, server)
    return running, job


@pytest.mark.parametrize("flavour", TELLING)
async def test_the_next_pull_after_one_that_failed_borders_what_was_sampled_since(
    world: World, flavour: str
) -> None:
    """The server holds no version that we vouch for, and samples all the same."""
    server = world.serve(flavour, step_s=STEP_S)
    async with world.engine() as engine:
        running, job = await begun(engine, world, server)
        server.broken_routes[pause_route(server)] = 500
        with pytest.raises(WeightError, match="status 500"):
            await engine.pull(world.publish(2), world.channel)
        server.broken_routes.clear()
        server.core.holds = False
        await until_longer(job, server)
        await engine.pull(world.publish(2), world.channel)
        segments = await running
        assert sampled(job) == told(segments)
        assert [0, 1, 2] == [segment.policy_version for segment in segments]


@pytest.mark.parametrize("flavour", TELLING)
async def test_a_resumption_whose_answer_is_lost_is_under_the_new_version(
    world: World, flavour: str
) -> None:
    """The pull failed for us, and the server goes on with what it took."""
    server = world.serve(flavour, step_s=STEP_S)
    async with world.engine() as engine:
        running, job = await begun(engine, world, server)
        server.broken_routes[resume_route(server)] = 500
        with pytest.raises(WeightError, match="status 500"):
            await engine.pull(world.publish(2), world.channel)
        server.core.paused = False
        segments = await running
        assert sampled(job) == told(segments)
        assert [0, 1, 2] == [segment.policy_version for segment in segments]


@pytest.mark.parametrize("flavour", TELLING)
async def test_a_pull_that_fails_untouched_makes_no_border(world: World, flavour: str) -> None:
    """The same version before and after it is one segment."""
    server = world.serve(flavour, step_s=STEP_S)
    async with world.engine() as engine:
        running, job = await begun(engine, world, server)
        gone = world.publish(2)
        world.weights.retire(0)
        with pytest.raises(WeightError, match="no longer served"):
            await engine.pull(gone, world.channel)
        segments = await running
        assert sampled(job) == told(segments)
        assert [0, 1] == [segment.policy_version for segment in segments]


@pytest.mark.parametrize("flavour", TELLING)
async def test_an_answer_that_was_whole_when_its_server_was_lost_is_kept(
    world: World, flavour: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both may come up in one tick of the loop; what the server held is forgotten by then."""
    server = world.serve(flavour, step_s=STEP_S)
    heard = ServerClient._heard

    async def heard_and_lost(self: ServerClient, running: Running) -> Answer:
        answer = await heard(self, running)
        self.lose("did not answer /health")
        return answer

    async with world.engine(beat_s=60.0) as engine:
        monkeypatch.setattr(ServerClient, "_heard", heard_and_lost)
        running, job = await begun(engine, world, server)
        server.core.holds = False
        segments = await running
        assert sampled(job) == told(segments)
        assert {0, 1} == set(told(segments))
        assert job.token_ids == tokens(segments)
        assert "did not answer /health" == engine._servers[0].state.trouble


async def test_a_server_that_was_lost_during_its_pull_holds_nothing(world: World) -> None:
    """It may be up again by the end, and another process."""
    server = world.serve("vllm-0.25.1")
    async with world.engine() as engine:
        await engine.pull(world.publish(0), world.channel)
        delivery = engine._monitors[0].server._delivery
        deliver = delivery.deliver

        async def restarted_meanwhile(order: object) -> int:
            num_bytes = await deliver(order)  # type: ignore[arg-type]
            server.kill()
            await until(lambda: not up(engine), "nobody noticed")
            server.restart()
            await until(lambda: bool(up(engine)), "not met again")
            return num_bytes

        delivery.deliver = restarted_meanwhile  # type: ignore[method-assign, assignment]
        with pytest.raises(WeightError, match="was lost during its pull"):
            await engine.pull(world.publish(1), world.channel)
        assert -1 == engine.policy_version
        delivery.deliver = deliver  # type: ignore[method-assign]
        await engine.pull(world.publish(1), world.channel)
        assert 1 == engine.policy_version


async def test_tokens_under_weights_that_nobody_named_are_refused(world: World) -> None:
    """Our plugin forgets the label as an update begins; a server that samples on is shut."""
    server = world.serve("vllm-0.25.1", step_s=STEP_S)
    async with world.engine() as engine:
        running, _ = await begun(engine, world, server)
        server.core.label, server.core.holds = "", False
        with pytest.raises(EngineError, match="version ''"):
            await running
        assert -1 == engine.policy_version


async def test_a_server_that_names_no_versions_is_cut_at_each_pull(world: World) -> None:
    """An answer in one piece without versions is of the weights that it began with, or of none."""
    server = world.serve("sglang-0.5.17", step_s=STEP_S)
    async with world.engine() as engine:
        await engine.pull(world.publish(0), world.channel)
        running = asyncio.create_task(collect(engine, long_request(LONG)))
        await until_sampling(server)
        (job,) = server.core.jobs.values()
        await engine.pull(world.publish(1), world.channel)
        segments = await running
        assert sampled(job) == told(segments)
        assert FinishReason.ABORT is segments[-1].finish_reason
        server.core.label = "default"
        with pytest.raises(EngineError, match="weight_version is 'default'"):
            await collect(engine, long_request(LONG))
