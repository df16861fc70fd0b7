"""The promises of the port `Engine`, held against every engine that runs in this process."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from rlstreams.schemas.events import NO_VERSION
from rlstreams.workers.engines.base import (
    FinishReason,
    PromptTooLongError,
    SampleRequest,
    TokenSequence,
)
from rlstreams.workers.model.base import EngineError
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
from tests.contract.engine_waits import num_running, num_waiting, until_idle, until_sampled
from tests.fake_engine import EOS


@pytest.fixture(
    params=(*KINDS, *SERVED[::3], REAL)
)  # control differs between versions, not sampling
def rig(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Rig]:
    made = make_rig(request, tmp_path)
    yield made
    made.close()


async def test_nothing_is_sampled_before_the_first_pull(rig: Rig) -> None:
    """A loaded engine holds no version: a request waits until weights were checked."""
    async with driven(rig.engine()) as engine:
        early = asyncio.create_task(collect(engine, request()))
        await asyncio.sleep(0.2)
        assert engine.policy_version == NO_VERSION
        assert not early.done()
        assert not engine.is_ready
        pulled = await engine.pull(rig.publish(0), rig.channel)
        segments = await early
        assert {s.policy_version for s in segments} == {0}
        assert {s.weight_hash for s in segments} == {pulled.weight_hash}
        assert engine.is_ready


async def test_a_segment_says_why_it_ended_and_fits_its_fields(rig: Rig) -> None:
    """One log-prob per token, a finish reason, and rows for all tokens but the last."""
    async with driven(rig.engine()) as engine:
        await engine.pull(rig.publish(0), rig.channel)
        (segment,) = await collect(engine, rig.long_request())
        assert segment.finish_reason is FinishReason.LENGTH
        assert len(segment.token_ids) == rig.long_tokens
        assert segment.logprobs.shape == segment.token_ids.shape
        assert segment.logprobs.max() <= 0
        if not rig.captures_experts:
            return
        assert segment.routed_experts.dtype == np.uint8
        assert segment.routed_experts_start == 0
        assert len(segment.routed_experts) == len(PROMPT) + rig.long_tokens - 1


async def test_an_answer_stops_behind_its_end_token(rig: Rig) -> None:
    """STOP means that the last token, and no other, is the end-of-sequence token."""
    async with driven(rig.engine()) as engine:
        await engine.pull(rig.publish(0), rig.channel)
        wanted = [
            request(f"{i}/0/0", temperature=rig.heat(64.0), max_new_tokens=50, token_ids=PROMPT[:5])
            for i in range(20)
        ]
        results = await asyncio.gather(*(collect(engine, one) for one in wanted))
        for (segment,) in results:
            stopped = segment.finish_reason is FinishReason.STOP
            assert segment.token_ids.tolist().count(EOS) == int(stopped)
            assert (segment.token_ids[-1] == EOS) == stopped
            assert stopped or len(segment.token_ids) == 50
        assert 0 < sum(s.finish_reason is FinishReason.STOP for (s,) in results) < 20


async def test_every_token_that_was_sampled_is_counted(rig: Rig) -> None:
    """Those of an abandoned request too: it tells nobody of them, and they cost as much."""
    async with driven(rig.engine()) as engine:
        assert engine.num_sampled == 0
        await engine.pull(rig.publish(0), rig.channel)
        wanted = [request(f"{i}/0/0", token_ids=PROMPT[: 1 + i]) for i in range(5)]
        results = await asyncio.gather(*(collect(engine, one) for one in wanted))
        told = sum(len(tokens(result)) for result in results)
        assert told == engine.num_sampled > 0

        if not rig.counts_abandoned:
            return
        abandoned = asyncio.create_task(collect(engine, rig.long_request()))
        await until_sampled(engine, told + 1)
        abandoned.cancel()
        await asyncio.wait([abandoned])
        await until_idle(engine)
        counted = engine.num_sampled
        assert told < counted <= told + 110
        assert len(tokens(await collect(engine, request("9/0/0")))) == engine.num_sampled - counted


async def test_a_later_request_may_finish_first(rig: Rig) -> None:
    async with driven(rig.engine()) as engine:
        await engine.pull(rig.publish(0), rig.channel)
        order: list[str] = []

        async def note(wanted: SampleRequest) -> None:
            await collect(engine, wanted)
            order.append(wanted.sample_id)

        rig.hold()
        first = asyncio.create_task(note(rig.endless_request()))
        await rig.until_sampling(engine)
        await rig.beside(note(request("1/0/0", max_new_tokens=1)))
        await rig.end(engine)
        await first
        assert order == ["1/0/0", rig.long]


async def test_more_requests_than_slots_all_finish(rig: Rig) -> None:
    async with driven(rig.engine(slots=3)) as engine:
        await engine.pull(rig.publish(0), rig.channel)
        wanted = [request(f"{i}/0/0", token_ids=PROMPT[: 1 + i % 7]) for i in range(30)]
        results = await asyncio.gather(*(collect(engine, one) for one in wanted))
        assert all(result[-1].finish_reason in ("stop", "length") for result in results)
        assert (num_running(engine), num_waiting(engine)) == (0, 0)


async def test_tokens_do_not_depend_on_batch_mates(rig: Rig) -> None:
    """The draw at a position is keyed by seed, sample and position alone."""
    async with driven(rig.engine(slots=5)) as engine:
        await engine.pull(rig.publish(0), rig.channel)
        wanted = [
            request(f"{i}/0/0", token_ids=PROMPT[: 1 + i % 7], temperature=2.0, max_new_tokens=40)
            for i in range(12)
        ]
        alone = [await collect(engine, one) for one in wanted]
        together = await asyncio.gather(*(collect(engine, one) for one in reversed(wanted)))
        for one, other in zip(alone, reversed(together), strict=True):
            assert tokens(one) == tokens(other)
            np.testing.assert_allclose(one[0].logprobs, other[0].logprobs, atol=1e-4)


async def test_another_seed_attempt_or_sample_draws_other_tokens(rig: Rig) -> None:
    async with driven(rig.engine()) as engine:
        await engine.pull(rig.publish(0), rig.channel)
        results = [
            tokens(await collect(engine, request(sample_id, temperature=rig.heat(8.0))))[:5]
            for sample_id in ("0/0/0", "0/1/0", "0/0/1")
        ]
        assert len({tuple(result) for result in results}) == 3


async def test_temperature_zero_takes_the_likeliest_token(rig: Rig) -> None:
    """Greedy answers do not depend on the sample; top-k of one is the same choice."""
    async with driven(rig.engine()) as engine:
        await engine.pull(rig.publish(0), rig.channel)
        greedy = await collect(engine, request("0/0/0", temperature=0.0))
        again = await collect(engine, request("9/9/9", temperature=0.0))
        top_1 = await collect(engine, request("5/0/0", top_k=1))
        assert tokens(greedy) == tokens(again) == tokens(top_1)
        assert greedy[0].logprobs.min() < 0  # of temperature 1, not of certainty
        assert top_1[0].logprobs.tolist() == [0.0] * len(tokens(top_1))


async def test_logprobs_are_those_of_the_scorer(rig: Rig) -> None:
    """Engine mismatch of equal weights in float32 is rounding: below 1e-4, 2e-6 on average."""
    scorer = rig.scorer()
    scorer.pull(rig.publish(0), rig.channel)
    async with driven(rig.engine()) as engine:
        await engine.pull(rig.publish(0), rig.channel)
        wanted = [
            request(f"{i}/0/0", token_ids=PROMPT[: 2 + i % 6], max_new_tokens=30, temperature=1.5)
            for i in range(20)
        ]
        results = await asyncio.gather(*(collect(engine, one) for one in wanted))
        sequences = [
            TokenSequence(token_ids=np.concatenate([one.token_ids, result[0].token_ids]))
            for one, result in zip(wanted, results, strict=True)
        ]
        scores = scorer.score(sequences, 0, 1.5)
        gaps = np.concatenate(
            [
                np.abs(result[0].logprobs - score.logprobs[len(one.token_ids) :])
                for one, result, score in zip(wanted, results, scores, strict=True)
            ]
        )
        assert gaps.max() < 1e-4
        assert gaps.mean() < 2e-6


async def test_logprobs_are_of_the_filtered_distribution(rig: Rig) -> None:
    """With top-k of three a token's probability counts among three only."""
    async with driven(rig.engine()) as engine:
        await engine.pull(rig.publish(0), rig.channel)
        wanted = [
            request(f"{i}/0/0", temperature=rig.heat(5.0), top_k=3, max_new_tokens=1)
            for i in range(40)
        ]
        results = await asyncio.gather(*(collect(engine, one) for one in wanted))
        probability = {tokens(r)[0]: float(np.exp(r[0].logprobs[0])) for r in results}
        assert len(probability) == 3
        assert sum(probability.values()) == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize(
    ("wanted", "error", "message"),
    [
        (request(token_ids=np.array([1, 9999], np.int32)), EngineError, r"token_ids\[1\] = 9999"),
        (request(token_ids=np.array([-1], np.int32)), EngineError, r"token_ids\[0\] = -1"),
        (request(token_ids=np.array([], np.int32)), EngineError, "empty"),
        (request(token_ids=np.ones(9999, np.int32)), PromptTooLongError, "9999 tokens.*limit"),
        (request(max_new_tokens=0), EngineError, "max_new_tokens"),
        (request(temperature=-1.0), EngineError, "temperature"),
        (request(prompt_tokens=8), EngineError, "prompt_tokens"),
    ],
)
async def test_what_cannot_be_sampled_is_refused_by_name(
    rig: Rig, wanted: SampleRequest, error: type[Exception], message: str
) -> None:
    async with driven(rig.engine()) as engine:
        with pytest.raises(error, match=message):
            await collect(engine, wanted)
        await engine.pull(rig.publish(0), rig.channel)
        assert await collect(engine, request())


async def test_a_prompt_that_nearly_fills_the_model_ends_by_length(rig: Rig) -> None:
    """The model's longest sequence bounds an answer as max_new_tokens does."""
    async with driven(rig.engine()) as engine:
        await engine.pull(rig.publish(0), rig.channel)
        prompt = np.resize(PROMPT, engine.max_tokens - 1)
        (segment,) = await collect(engine, request(token_ids=prompt))
        assert len(segment.token_ids) == 1
        assert segment.finish_reason in ("length", "stop")


async def test_a_later_turn_goes_on_behind_what_was_said(rig: Rig) -> None:
    """All that came before counts as given: its length is its own, its log-probs are those of the
    whole sequence, and expert rows come for the environment's tokens too.
    """
    scorer = rig.scorer()
    scorer.pull(rig.publish(0), rig.channel)
    async with driven(rig.engine()) as engine:
        await engine.pull(rig.publish(0), rig.channel)
        first = await collect(engine, request(max_new_tokens=5))
        said = np.array([9, 4, 8], np.int32)
        given = np.concatenate([PROMPT, *(s.token_ids for s in first), said])
        segments = await collect(engine, request(token_ids=given, max_new_tokens=6))
        sampled = np.array(tokens(segments), np.int32)
        reason = segments[-1].finish_reason
        assert len(sampled) == 6 or (reason is FinishReason.STOP and sampled[-1] == EOS)
        whole = np.concatenate([given, sampled])
        (score,) = scorer.score([TokenSequence(token_ids=whole)], 0, 1.0)
        logprobs = np.concatenate([segment.logprobs for segment in segments])
        np.testing.assert_allclose(logprobs, score.logprobs[len(given) :], atol=1e-4)
        if rig.captures_experts:
            assert rows_of(segments) == list(range(len(whole) - 1))


async def test_a_later_turn_that_was_aborted_is_resumed(rig: Rig) -> None:
    """The rest of the turn is what it would have been; no row of experts comes a second time."""
    async with driven(rig.engine()) as engine:
        await engine.pull(rig.publish(0), rig.channel)
        given = np.concatenate([PROMPT, np.array([EOS, 9, 4, 8], np.int32)])
        whole = await collect(engine, request(token_ids=given, temperature=0.0, max_new_tokens=8))
        held = np.array(tokens(whole)[:3], np.int32)
        resumed = await collect(
            engine,
            request(
                token_ids=np.concatenate([given, held]),
                prompt_tokens=len(given),
                temperature=0.0,
                max_new_tokens=8,
            ),
        )
        assert tokens(whole) == [*held.tolist(), *tokens(resumed)]
        if rig.captures_experts:
            num_tokens = len(given) + len(tokens(whole))
            assert rows_of(resumed) == list(range(len(given) + len(held) - 1, num_tokens - 1))
