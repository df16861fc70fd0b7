"""The promises of the port `Engine` when weights change, requests are cut and engines end."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rlstreams.schemas.events import NO_VERSION
from rlstreams.workers.engines.base import FinishReason, TokenSequence
from rlstreams.workers.model.base import EngineError
from rlstreams.workers.weights.channel import WeightError
from tests.contract.engine_rigs import (
    KINDS,
    PROMPT,
    REAL,
    SERVED,
    Rig,
    collect,
    driven,
    make_rig,
    request,
    rows_of,
    tokens,
)
from tests.contract.engine_waits import (
    cut,
    go_on,
    num_running,
    num_waiting,
    stand_still,
    until_idle,
    until_waiting,
)


@pytest.fixture(params=(*KINDS, *SERVED, REAL))
def rig(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Rig]:
    made = make_rig(request, tmp_path)
    made.stops = False
    yield made
    made.close()


async def test_a_trajectory_spans_two_versions(rig: Rig) -> None:
    """Weights change between two tokens: each segment names the version of all of its tokens."""
    async with driven(rig.engine()) as engine:
        await engine.pull(rig.publish(0), rig.channel)
        rig.hold()
        running = asyncio.create_task(collect(engine, rig.endless_request()))
        await rig.until_sampling(engine)
        await stand_still(engine)
        await engine.pull(rig.publish(1), rig.channel)
        assert engine.policy_version == 1
        go_on(engine)
        await rig.end(engine)
        if not rig.goes_on:
            (cut,) = await running
            assert (cut.policy_version, cut.finish_reason) == (0, FinishReason.ABORT)
            return
        before, after = await running
        assert (before.policy_version, after.policy_version) == (0, 1)
        assert before.finish_reason is FinishReason.POLICY_CHANGED
        assert after.finish_reason in ("length", "stop", "abort")
        assert before.weight_hash != after.weight_hash
        num_tokens = len(PROMPT) + len(tokens([before, after]))
        if rig.captures_experts:
            assert rows_of([before, after]) == list(range(num_tokens - 1))

        scorer, heat = rig.scorer(), rig.long_request().sampling.temperature
        for version, segment in ((0, before), (1, after)):
            scorer.pull(rig.publish(version), rig.channel)
            if rig.keeps_cache and version == 1:
                continue  # the cache holds keys and values of version 0: no scorer sees that
            ids = np.concatenate([PROMPT, *(s.token_ids for s in (before, after))], dtype=np.int32)
            (scores,) = scorer.score([TokenSequence(token_ids=ids)], version, heat)
            start = len(PROMPT) + (len(before.token_ids) if version else 0)
            scored = scores.logprobs[start : start + len(segment.token_ids)]
            np.testing.assert_allclose(segment.logprobs, scored, atol=1e-4)


async def test_a_pull_without_a_pause_disturbs_nobody(rig: Rig) -> None:
    """Requests in flight go on; every token is labelled by a version that was published."""
    async with driven(rig.engine()) as engine:
        await engine.pull(rig.publish(0), rig.channel)
        rig.hold()
        running = [
            asyncio.create_task(collect(engine, rig.long_request(f"{i}/0/0"))) for i in range(8)
        ]
        await rig.until_sampling(engine)
        hashes = [published.weight_hash for published in (rig.publish(1), rig.publish(2))]
        for version in (1, 2):
            await engine.pull(rig.publish(version), rig.channel)
        for segments in await asyncio.gather(*running):
            versions = [s.policy_version for s in segments]
            assert versions == sorted(set(versions))
            assert all(s.weight_hash == hashes[s.policy_version - 1] for s in segments[1:])


async def test_an_aborted_request_is_resumed_where_it_stood(rig: Rig) -> None:
    """Resumed with its tokens so far it gives the tokens and rows that it would have given."""
    async with driven(rig.engine()) as engine:
        await engine.pull(rig.publish(0), rig.channel)
        whole = await collect(engine, rig.long_request())
        wanted = rig.endless_request()
        rig.hold()
        running = asyncio.create_task(collect(engine, wanted))
        await rig.until_sampling(engine)
        await cut(engine)
        (partial,) = await running
        rig.hasten()
        assert partial.finish_reason is FinishReason.ABORT
        num_so_far = len(partial.token_ids)
        assert 0 < num_so_far < wanted.sampling.max_new_tokens
        num_wanted = max(rig.long_tokens, num_so_far + 10)
        (rest,) = await collect(
            engine,
            replace(
                wanted,
                token_ids=np.concatenate([PROMPT, partial.token_ids]),
                prompt_tokens=len(PROMPT),
                sampling=replace(wanted.sampling, max_new_tokens=num_wanted),
            ),
        )
        assert len(tokens([partial, rest])) == num_wanted
        if rig.replays_draws:
            assert tokens([partial, rest]) == tokens(whole)
        if not rig.rows_of_aborted:
            return
        assert rows_of([partial, rest]) == rows_of(whole)
        assert partial.routed_experts is not None
        assert rest.routed_experts is not None
        assert whole[0].routed_experts is not None
        stitched = np.concatenate([partial.routed_experts, rest.routed_experts])
        same = np.sort(stitched, -1) == np.sort(whole[0].routed_experts, -1)
        if rig.replays_draws:
            assert same.mean() > 0.99  # rounding may turn a near tie


async def test_a_failed_pull_never_labels_a_token(rig: Rig) -> None:
    """Weights whose hash is not the published one are refused, and the engine goes on."""
    async with driven(rig.engine()) as engine:
        await engine.pull(rig.publish(0), rig.channel)
        bad = rig.publish(1)
        (path,) = rig.folder.glob("v00000001-*.safetensors")
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)
        with pytest.raises(WeightError, match="policy version 1"):
            await engine.pull(bad, rig.channel)
        assert engine.policy_version != 1
        await engine.pull(rig.publish(2), rig.channel)
        segments = await collect(engine, request())
        assert {s.policy_version for s in segments} == {2}


async def test_who_slept_samples_nothing_before_it_holds_a_version_again(rig: Rig) -> None:
    """Sleep cuts what runs and keeps what comes; afterwards the same tokens are sampled as before,
    by an engine that lost its weights not before a pull."""
    async with driven(rig.engine()) as engine:
        await engine.pull(rig.publish(0), rig.channel)
        before = await collect(engine, rig.long_request())
        rig.hold()
        running = asyncio.create_task(collect(engine, rig.endless_request("1/0/0")))
        await rig.until_sampling(engine)
        await engine.sleep()
        assert (await running)[-1].finish_reason is FinishReason.ABORT
        rig.hasten()
        waiting = asyncio.create_task(collect(engine, rig.long_request()))
        await asyncio.sleep(0.05)
        assert engine.num_sampled == sum(len(s.token_ids) for s in [*before, *await running])
        await engine.wake()
        if engine.policy_version == NO_VERSION:
            await asyncio.sleep(0.05)
            assert not waiting.done()
            await engine.pull(rig.publish(0), rig.channel)
        after = await waiting
        assert {segment.policy_version for segment in after} == {0}
        np.testing.assert_array_equal(tokens(before), tokens(after))


async def test_closing_ends_every_request(rig: Rig) -> None:
    async with driven(rig.engine(slots=2)) as engine:
        await engine.pull(rig.publish(0), rig.channel)
        rig.hold()
        open_ = [
            asyncio.create_task(collect(engine, rig.endless_request(f"{i}/0/0"))) for i in range(6)
        ]
        await rig.until_sampling(engine)
        await engine.close()
        await engine.close()
        for segments in await asyncio.gather(*open_):
            assert segments[-1].finish_reason in ("abort", "length", "stop")
        assert any(t.result()[-1].finish_reason is FinishReason.ABORT for t in open_)
        assert not engine.is_ready
        with pytest.raises(EngineError, match="closed"):
            await collect(engine, request())


async def test_who_waits_for_a_place_and_leaves_takes_none(rig: Rig) -> None:
    """While all places are taken; what runs is not disturbed, and nothing was sampled for it."""
    async with driven(rig.engine(slots=1)) as engine:
        await engine.pull(rig.publish(0), rig.channel)
        rig.hold()
        running = asyncio.create_task(collect(engine, rig.endless_request()))
        await rig.until_sampling(engine)
        waiting = [asyncio.create_task(collect(engine, request(f"{i}/0/0"))) for i in (1, 2)]
        await until_waiting(engine, 2)
        for task in waiting:
            task.cancel()
        assert [True, True] == [
            isinstance(found, asyncio.CancelledError)
            for found in await asyncio.gather(*waiting, return_exceptions=True)
        ]
        await until_waiting(engine, 0)
        await cut(engine)
        segments = await running
        rig.hasten()
        assert engine.num_sampled >= len(tokens(segments)) > 0
        assert await collect(engine, request("3/0/0"))
        assert 0 == num_running(engine)


async def test_requests_that_are_given_up_together_free_their_places(rig: Rig) -> None:
    """As after a rebalance: running and waiting ones, all at once, while another one goes on; as
    many as before can run."""
    async with driven(rig.engine(slots=2)) as engine:
        await engine.pull(rig.publish(0), rig.channel)
        rig.hold()
        given_up = [
            asyncio.create_task(collect(engine, rig.endless_request(f"{i}/0/0"))) for i in range(6)
        ]
        await rig.until_sampling(engine)
        await until_waiting(engine, 4)
        later = asyncio.create_task(collect(engine, request("7/0/0")))
        await until_waiting(engine, 5)
        before = engine.num_sampled
        for task in given_up:
            task.cancel()
        await asyncio.gather(*given_up, return_exceptions=True)
        rig.hasten()
        segments = await later
        assert segments[-1].finish_reason in ("length", "stop")
        await until_idle(engine)
        assert num_waiting(engine) == 0
        assert engine.num_sampled >= before + len(tokens(segments))
        both = [asyncio.create_task(collect(engine, request(f"{i}/0/0"))) for i in (8, 9)]
        assert all(await asyncio.gather(*both))


async def test_a_listener_that_leaves_frees_its_slot(rig: Rig) -> None:
    async with driven(rig.engine(slots=1)) as engine:
        await engine.pull(rig.publish(0), rig.channel)
        rig.hold()
        task = asyncio.create_task(collect(engine, rig.endless_request()))
        await rig.until_sampling(engine)
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        rig.hasten()
        assert await collect(engine, request("1/0/0"))
        assert num_running(engine) == 0
