"""Each token is told under the version that sampled it, whatever became of the pulls meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest

from rlstreams.workers.engines.base import FinishReason, GeneratedSegment, PauseMode
from rlstreams.workers.engines.served.answer import Held, ModelShape, UnknownVersionError
from rlstreams.workers.engines.served.engine import ServedEngine
from rlstreams.workers.engines.served.running import Running
from rlstreams.workers.engines.served.server import Server
from rlstreams.workers.engines.served.wire import Answer, AnswerError, GenerateRequest, joined
from rlstreams.workers.model.base import EngineError
from rlstreams.workers.weights.channel import WeightError
from tests.contract.engine_rigs import collect, long_request, tokens
from tests.served.test_gate import until_sampling
from tests.servers.fake_server import VERSIONS, FakeServer
from tests.servers.markov import Job
from tests.servers.world import World
from tests.waiting import until

LONG = "0/0/0"
STREAMING = ("vllm-0.25.1", "sglang-0.5.17")  # they report no spans
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
    """Until a few tokens more are there; it stands still until the next pause then, and what is
    left is sampled as fast as it goes."""
    server.core.step_s = STEP_S
    least = len(job.token_ids) + 3
    await until(lambda: len(job.token_ids) >= least, "nothing more is sampled")
    server.core.holds, server.core.step_s = True, 0.0


async def begun(
    engine: ServedEngine, world: World, server: FakeServer
) -> tuple[asyncio.Task[list[GeneratedSegment]], Job]:
    """A request that version 0 began and version 1 goes on with."""
    await engine.pull(world.publish(0), world.channel)
    running = asyncio.create_task(collect(engine, long_request(LONG)))
    await until_sampling(server)
    (job,) = server.core.jobs.values()
    await engine.pull(world.publish(1), world.channel)
    await until_longer(job, server)
    return running, job


@pytest.mark.parametrize("flavour", VERSIONS)
def test_a_pull_that_fails_at_its_pause_changes_no_version(world: World, flavour: str) -> None:
    """Nothing was delivered: the request goes on under what it ran under, to its end."""
    server = world.serve(flavour, step_s=STEP_S)

    async def scenario(engine: ServedEngine) -> None:
        running, job = await begun(engine, world, server)
        server.broken_routes[pause_route(server)] = 500
        with pytest.raises(WeightError, match="status 500"):
            await engine.pull(world.publish(2), world.channel)
        server.core.holds = False
        segments = await running
        assert sampled(job) == told(segments)
        assert [0, 1] == [segment.policy_version for segment in segments]
        assert FinishReason.LENGTH is segments[-1].finish_reason

    world.run(scenario)


@pytest.mark.parametrize("flavour", STREAMING)
def test_a_server_that_does_not_fall_silent_changes_no_version(world: World, flavour: str) -> None:
    """It went on sampling, and nothing was delivered."""
    server = world.serve(flavour, step_s=STEP_S)

    async def scenario(engine: ServedEngine) -> None:
        running, job = await begun(engine, world, server)
        server.core.pause = lambda *, aborts: None  # type: ignore[method-assign]
        server.core.step_s, server.core.holds = 0.02, False  # it talks for longer than that
        one = engine._keepers[0].server
        settings, one._settings = one._settings, replace(one._settings, answer_s=0.1)
        with pytest.raises(WeightError):
            await engine.pull(world.publish(2), world.channel)
        one._settings, server.core.step_s = settings, 0.0
        segments = await running
        assert sampled(job) == told(segments)
        assert {0, 1} == set(told(segments))

    world.run(scenario)


@pytest.mark.parametrize("flavour", VERSIONS)
def test_the_next_pull_after_one_that_failed_borders_what_was_sampled_since(
    world: World, flavour: str
) -> None:
    """The server holds no version that we vouch for, and samples all the same."""
    server = world.serve(flavour, step_s=STEP_S)

    async def scenario(engine: ServedEngine) -> None:
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

    world.run(scenario)


@pytest.mark.parametrize("flavour", VERSIONS)
def test_a_resumption_whose_answer_is_lost_is_under_the_new_version(
    world: World, flavour: str
) -> None:
    """The pull failed for us, and the server goes on with what it took."""
    server = world.serve(flavour, step_s=STEP_S)

    async def scenario(engine: ServedEngine) -> None:
        running, job = await begun(engine, world, server)
        server.broken_routes[resume_route(server)] = 500
        with pytest.raises(WeightError, match="status 500"):
            await engine.pull(world.publish(2), world.channel)
        server.core.paused = False
        segments = await running
        assert sampled(job) == told(segments)
        assert [0, 1, 2] == [segment.policy_version for segment in segments]

    world.run(scenario)


@pytest.mark.parametrize("flavour", VERSIONS)
def test_a_pull_that_fails_untouched_makes_no_border(world: World, flavour: str) -> None:
    """The same version before and after it is one segment."""
    server = world.serve(flavour, step_s=STEP_S)

    async def scenario(engine: ServedEngine) -> None:
        running, job = await begun(engine, world, server)
        gone = world.publish(2)
        world.weights.retire(0)
        with pytest.raises(WeightError, match="no longer served"):
            await engine.pull(gone, world.channel)
        segments = await running
        assert sampled(job) == told(segments)
        assert [0, 1] == [segment.policy_version for segment in segments]

    world.run(scenario)


@pytest.mark.parametrize("flavour", VERSIONS)
def test_a_request_that_is_aborted_after_a_failed_pull_is_told_truly(
    world: World, flavour: str
) -> None:
    """It ends with what it has."""
    server = world.serve(flavour, step_s=STEP_S)

    async def scenario(engine: ServedEngine) -> None:
        running, job = await begun(engine, world, server)
        server.broken_routes[pause_route(server)] = 500
        with pytest.raises(WeightError, match="status 500"):
            await engine.pull(world.publish(2), world.channel)
        heard = engine._keepers[0].server._requests
        if not server.has_spans:
            await until(lambda: sum(r.num_tokens for r in heard) == len(job.token_ids), "unheard")
        await engine.abort(LONG)
        segments = await running
        assert sampled(job) == told(segments)
        assert {0, 1} == set(told(segments))
        assert FinishReason.ABORT is segments[-1].finish_reason

    world.run(scenario)


@pytest.mark.parametrize("flavour", VERSIONS)
def test_an_answer_that_was_whole_when_its_server_was_lost_is_kept(
    world: World, flavour: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both may come up in one turn of the loop; what the server held is forgotten by then."""
    server = world.serve(flavour, step_s=STEP_S)
    heard = Server._heard

    async def heard_and_lost(self: Server, running: Running) -> Answer:
        answer = await heard(self, running)
        self.lose("did not answer /health")
        return answer

    async def scenario(engine: ServedEngine) -> None:
        monkeypatch.setattr(Server, "_heard", heard_and_lost)
        running, job = await begun(engine, world, server)
        server.core.holds = False
        segments = await running
        assert sampled(job) == told(segments)
        assert {0, 1} == set(told(segments))
        assert job.token_ids == tokens(segments)
        assert "did not answer /health" == engine._keepers[0].server.trouble

    world.run(scenario, beat_s=60.0)


@pytest.mark.parametrize("flavour", VERSIONS)
def test_weights_do_not_change_under_a_server_whose_pause_failed(
    world: World, flavour: str
) -> None:
    """It is held back all the same, and sampling: a pull pauses it."""
    server = world.serve(flavour, step_s=STEP_S)

    async def scenario(engine: ServedEngine) -> None:
        running, job = await begun(engine, world, server)
        server.broken_routes[pause_route(server)] = 500
        with pytest.raises(EngineError, match="status 500"):
            await engine.pause(PauseMode.KEEP)
        server.broken_routes.clear()
        server.called.clear()
        await engine.pull(world.publish(2), world.channel)
        assert server.called[0].startswith(pause_route(server))
        assert server.core.paused
        await engine.resume()
        segments = await running
        assert sampled(job) == told(segments)
        assert [0, 1, 2] == [segment.policy_version for segment in segments]

    world.run(scenario)


def test_a_server_that_was_lost_during_its_pull_holds_nothing(world: World) -> None:
    """It may be up again by the end, and another process."""
    server = world.serve("vllm-0.25.1")

    async def scenario(engine: ServedEngine) -> None:
        await engine.pull(world.publish(0), world.channel)
        delivery = engine._keepers[0].server._delivery
        deliver = delivery.deliver

        async def restarted_meanwhile(order: object) -> int:
            num_bytes = await deliver(order)  # type: ignore[arg-type]
            server.kill()
            await until(lambda: not engine.up(), "nobody noticed")
            server.restart()
            await until(lambda: bool(engine.up()), "not met again")
            return num_bytes

        delivery.deliver = restarted_meanwhile  # type: ignore[method-assign, assignment]
        with pytest.raises(WeightError, match="was lost during its pull"):
            await engine.pull(world.publish(1), world.channel)
        assert -1 == engine.policy_version
        delivery.deliver = deliver  # type: ignore[method-assign]
        await engine.pull(world.publish(1), world.channel)
        assert 1 == engine.policy_version

    world.run(scenario)


A, B, C = (Held(number, letter * 64) for number, letter in enumerate("abc"))
SHAPE = ModelShape(
    vocab_size=10, eos_ids=frozenset([1]), num_layers=1, moe_layers=(), num_experts=0, top_k=0
)


def begun_with(held: Held) -> Running:
    """A request of a server that was given A, B and C."""
    request = GenerateRequest(
        request_id="x",
        token_ids=[1, 2],
        max_new_tokens=9,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        seed=1,
        stop_token_ids=[1],
        experts_start=None,
        salt="",
    )
    return Running("0/0/0", request, held, {one.label: one for one in (A, B, C)})


def piece(num_tokens: int, *, label: str | None = None, finish_reason: str | None = None) -> Answer:
    return Answer(
        token_ids=[3] * num_tokens,
        logprobs=[-1.0] * num_tokens,
        label=label,
        finish_reason=finish_reason,
    )


def test_tokens_that_come_after_a_broken_pull_have_no_version() -> None:
    """Its weights are half of one version and half of another; a later pull does not heal them."""
    running = begun_with(A)
    running.hear(piece(2))
    running.change(None)
    (kept,) = running.segments(piece(2, finish_reason="abort"), SHAPE)
    assert (0, 2) == (kept.policy_version, len(kept.token_ids))
    running.hear(piece(1))
    running.change(B)
    running.hear(piece(1, finish_reason="length"))
    with pytest.raises(AnswerError, match="tokens 2 to 3 came after a pull that broke off"):
        running.segments(joined(running.parts), SHAPE)


def test_a_request_without_a_token_survives_a_broken_pull() -> None:
    """There is nothing that would need a version."""
    running = begun_with(A)
    running.change(None)
    (empty,) = running.segments(piece(0, finish_reason="abort"), SHAPE)
    assert (0, FinishReason.ABORT) == (len(empty.token_ids), empty.finish_reason)


def test_an_answer_without_spans_or_pieces_belongs_to_one_version_or_to_none() -> None:
    """Where in it weights changed, and changed back, nobody can tell."""
    running = begun_with(A)
    running.change(B)
    running.change(A)
    with pytest.raises(AnswerError, match="weight_versions is missing"):
        running.segments(piece(2, finish_reason="length"), SHAPE)


@pytest.mark.parametrize("last", [B.label, C.label])
def test_the_name_at_the_end_may_be_of_what_was_put_there_since(last: str) -> None:
    """All tokens were heard before; the piece that ends it is made after, or on the way."""
    running = begun_with(B)
    running.hear(piece(2, label=B.label))
    running.change(C)
    running.hear(piece(0, label=last, finish_reason="abort"))
    (segment,) = running.segments(joined(running.parts), SHAPE)
    assert (1, 2) == (segment.policy_version, len(segment.token_ids))


def test_a_name_that_was_never_given_voids_the_answer_though_it_is_gone_at_the_end() -> None:
    """Somebody else's weights were there for a while."""
    running = begun_with(A)
    running.hear(piece(1, label="default"))
    running.change(B)
    running.hear(piece(1, label=B.label, finish_reason="length"))
    with pytest.raises(UnknownVersionError, match="'default'"):
        running.segments(joined(running.parts), SHAPE)


def test_a_name_of_older_weights_voids_tokens_that_came_since() -> None:
    """The server did not take what it was given, whatever it said."""
    running = begun_with(A)
    running.change(B)
    running.hear(piece(1, label=A.label, finish_reason="length"))
    with pytest.raises(UnknownVersionError, match=A.label):
        running.segments(joined(running.parts), SHAPE)
