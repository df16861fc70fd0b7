"""The rollout role on the in-memory log with the fake engine."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlstreams.schemas.events import (
    DeadLetter,
    PolicyLoaded,
    PolicyPublished,
    PullRequested,
    Trajectory,
    WorkerReport,
)
from rlstreams.streams.log.topics import DEAD_LETTERS, POLICY_PULLS, TRAJECTORIES, WORKER_EVENTS
from rlstreams.workers.engines.decode import Generation
from rlstreams.workers.loop.stage import StageLoop
from rlstreams.workers.policy import puller
from rlstreams.workers.rollout.worker import make_worker
from rlstreams.workers.sandbox.reward import AnswerToJudge, Judgement, Verifier
from rlstreams.workers.weights.channel import Pulled, WeightChannel, WeightError
from rlstreams.workers.weights.file import FileWeightChannel
from tests.fake_engine import FakeEngine
from tests.unit.roles.stand import DEADLINE_S, Stand, make_sampler, tick_until


class StandsAfterOne(FakeEngine):
    """Pauses itself behind the first token that it samples."""

    def __init__(self) -> None:
        super().__init__()
        decoder: Any = self._scheduler._decoder
        self._advance, decoder._advance = decoder._advance, self._stand

    def _stand(self, rows: list[Generation]) -> None:
        self._advance(rows)
        self._scheduler._paused |= self.num_sampled == 1


def make_rollout(
    stand: Stand, engine: FakeEngine | None = None, *, max_new_tokens: int = 6, ordinal: int = 0
) -> StageLoop:
    context = stand.context("rollout", ordinal)
    engine = engine or FakeEngine()
    sampler = make_sampler(stand, engine, max_new_tokens=max_new_tokens)
    return make_worker(context, context.bus, engine, FileWeightChannel(), sampler)


def trajectories(stand: Stand) -> list[Trajectory]:
    return stand.read(TRAJECTORIES.name, Trajectory)


def test_nothing_is_sampled_before_a_version_is_loaded(tmp_path: Path) -> None:
    """Prompts wait for the first pull; every trajectory names a load that the log holds."""
    stand = Stand(tmp_path)
    rollout = make_rollout(stand)
    stand.issue("0", 4)
    for _ in range(10):
        rollout.tick()
    assert trajectories(stand) == []
    stand.publish(0)
    tick_until(rollout, lambda: len(trajectories(stand)) == 4)
    rollout.close()
    loads = {load.load_id: load for load in stand.read(POLICY_PULLS.name, PolicyLoaded)}
    assert len(stand.read(POLICY_PULLS.name, PullRequested)) == 1
    for trajectory in trajectories(stand):
        _, segment = trajectory.segments
        assert loads[segment.load_id].policy_version == segment.policy_version == 0
        assert loads[segment.load_id].weight_hash == segment.weight_hash
        assert trajectory.reward == trajectory.reward_parts["length"]
        assert trajectory.routed_experts.shape == (3 + 6 - 1, 1, 2)


def test_a_prompt_waits_for_the_version_that_it_asks_for(tmp_path: Path) -> None:
    stand = Stand(tmp_path)
    stand.publish(0)
    rollout = make_rollout(stand)
    stand.issue("0", 1, min_policy_version=1)
    stand.issue("1", 1)
    tick_until(rollout, lambda: len(trajectories(stand)) == 1)
    assert [t.group_id for t in trajectories(stand)] == ["1"]
    stand.publish(1)
    tick_until(rollout, lambda: len(trajectories(stand)) == 2)
    rollout.close()
    assert trajectories(stand)[1].segments[1].policy_version == 1


def test_one_trajectory_spans_two_versions(tmp_path: Path) -> None:
    """Weights pulled in mid-sample end a segment, not the sample; nothing is sampled twice."""
    stand = Stand(tmp_path)
    stand.publish(0)
    engine = StandsAfterOne()
    rollout = make_rollout(stand, engine, max_new_tokens=60)
    stand.issue("0", 1)
    tick_until(rollout, lambda: engine.num_sampled == 1)
    stand.publish(1)
    tick_until(rollout, lambda: engine.policy_version == 1)
    engine._post(engine._scheduler.resume)
    tick_until(rollout, lambda: len(trajectories(stand)) == 1)
    rollout.close()
    (trajectory,) = trajectories(stand)
    prompt, first, second = trajectory.segments
    assert (first.policy_version, second.policy_version) == (0, 1)
    assert (first.finish_reason, second.finish_reason) == ("policy_changed", "length")
    assert len(first.token_ids) + len(second.token_ids) == 60
    assert first.load_id != second.load_id
    assert trajectory.routed_experts is not None
    ids = np.concatenate([s.token_ids.numpy() for s in (prompt, first, second)])
    experts = trajectory.routed_experts.numpy()
    assert (experts[:, 0, 0] == ids[:-1] % 4).all()
    assert trajectory.routed_experts_mask is None


class LoadsAndFails(StandsAfterOne):
    """A pull of version 1 that fails when the weights are there already."""

    async def pull(self, published: PolicyPublished, channel: WeightChannel) -> Pulled:
        pulled = await super().pull(published, channel)
        if published.policy_version == 1:
            raise WeightError("no answer behind the load")
        return pulled


def test_tokens_of_a_load_that_is_not_on_record_are_sampled_again(tmp_path: Path) -> None:
    """Nobody pulls that version any more: their sample would wait for its record for ever."""
    stand = Stand(tmp_path)
    stand.publish(0)
    engine = LoadsAndFails()
    rollout = make_rollout(stand, engine, max_new_tokens=60)
    stand.issue("0", 1)
    tick_until(rollout, lambda: engine.num_sampled == 1)
    stand.publish(1)
    tick_until(rollout, lambda: engine.policy_version == 1)
    engine._post(engine._scheduler.resume)
    tick_until(rollout, lambda: engine.num_sampled == 60)
    assert trajectories(stand) == []
    stand.publish(2)
    tick_until(rollout, lambda: len(trajectories(stand)) == 1)
    rollout.close()
    (trajectory,) = trajectories(stand)
    _, segment = trajectory.segments
    assert (segment.policy_version, len(segment.token_ids)) == (2, 60)


def test_what_cannot_be_rolled_out_is_dead_lettered_with_its_reason(tmp_path: Path) -> None:
    """A prompt too long, ids outside of the vocabulary, a verifier that fails: others go on."""
    stand = Stand(tmp_path)
    stand.publish(0)
    rollout = make_rollout(stand)
    long = np.zeros(200, np.int32) + 3
    outside = np.array([3, 99], np.int32)
    from rlstreams.schemas.events import Tensor

    stand.issue("0", 1, token_ids=Tensor.of(long))
    stand.issue("1", 1, token_ids=Tensor.of(outside))
    stand.issue("2", 1, answer="refuse")
    stand.issue("3", 1)
    tick_until(
        rollout,
        lambda: (
            len(trajectories(stand)) == 1 and len(stand.read(DEAD_LETTERS.name, DeadLetter)) == 3
        ),
    )
    rollout.close()
    letters = {d.group_id: d for d in stand.read(DEAD_LETTERS.name, DeadLetter)}
    assert {g: (d.reason, d.permanent) for g, d in letters.items()} == {
        "0": ("prompt_too_long", True),
        "1": ("engine", False),
        "2": ("reward", False),
    }
    assert "99" in letters["1"].detail
    assert "verifier.py:7" in letters["2"].detail


def test_a_pull_that_fails_is_tried_again_and_stops_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Announced weights that are gone leave the worker at the version that it holds."""
    monkeypatch.setattr(puller, "RETRY_S", 0.001)
    stand = Stand(tmp_path)
    stand.publish(0)
    rollout = make_rollout(stand)
    stand.issue("0", 1)
    tick_until(rollout, lambda: len(trajectories(stand)) == 1)
    stand.publish(1)
    stand.server.retire(0)
    for _ in range(20):
        rollout.tick()
    stand.issue("1", 1)
    tick_until(rollout, lambda: len(trajectories(stand)) == 2)
    assert trajectories(stand)[1].segments[1].policy_version == 0
    stand.publish(2)
    tick_until(rollout, lambda: len(stand.read(POLICY_PULLS.name, PolicyLoaded)) == 2)
    rollout.close()


class Both:
    """Two workers that tick one after the other."""

    def __init__(self, *loops: StageLoop) -> None:
        self._loops = loops

    def tick(self) -> None:
        for loop in self._loops:
            loop.tick()


def test_what_goes_to_another_worker_is_given_up(tmp_path: Path) -> None:
    """Its requests end and their places are free; the new owner samples them, once."""
    stand = Stand(tmp_path)
    stand.publish(0)
    stuck = FakeEngine()
    one = make_rollout(stand, stuck)
    for group_id, partition in (("0", 0), ("1", 1)):
        stand.issue(group_id, 2, partition=partition, min_policy_version=0)
    stuck._scheduler._paused = True
    stage = one._stage
    tick_until(one, lambda: len(stage._running) == 4)  # type: ignore[attr-defined]
    other = make_rollout(stand, ordinal=1)
    both = Both(one, other)
    tick_until(both, lambda: len(trajectories(stand)) == 2)  # type: ignore[arg-type]
    tick_until(both, lambda: stage.num_open == 2)  # type: ignore[arg-type]
    assert len(stuck._scheduler.waiting) == 2
    stuck._post(stuck._scheduler.resume)
    tick_until(both, lambda: len(trajectories(stand)) == 4)  # type: ignore[arg-type]
    other.close()
    one.close()
    assert [("0", 0), ("0", 1), ("1", 0), ("1", 1)] == sorted(
        (t.group_id, t.sample) for t in trajectories(stand)
    )


class Troubled(FakeEngine):
    """One of its servers is out of service."""

    @property
    def trouble(self) -> str:
        return "server http://a:1: does not answer since"


def test_a_report_names_what_the_engine_has_lost(tmp_path: Path) -> None:
    """Beside what the worker waits for."""
    stand = Stand(tmp_path)
    rollout = make_rollout(stand, Troubled())
    stand.issue("0", 1)

    def told() -> list[str]:
        return [report.detail for report in stand.read(WORKER_EVENTS.name, WorkerReport)]

    wanted = "for its first weights; server http://a:1: does not answer since"
    tick_until(rollout, lambda: wanted in told())
    rollout.close()


def test_a_report_says_that_samples_wait_for_their_rewards(tmp_path: Path) -> None:
    """The engine is idle then, and the trainer waits for samples: neither names the reward."""
    stand = Stand(tmp_path)
    judging = threading.Event()

    async def slow(answer: AnswerToJudge) -> Judgement:
        await asyncio.to_thread(judging.wait, DEADLINE_S)
        return Judgement(reward=1.0)

    context, engine = stand.context("rollout", 0), FakeEngine()
    sampler = replace(make_sampler(stand, engine), verifier=Verifier(slow, require_stop=False))
    rollout = make_worker(context, context.bus, engine, FileWeightChannel(), sampler)
    stand.publish(0)
    stand.issue("0", 8)

    def told() -> list[tuple[str, str]]:
        reports = stand.read(WORKER_EVENTS.name, WorkerReport)
        return [(report.state, report.detail) for report in reports]

    tick_until(rollout, lambda: ("working", "and waiting for rewards") in told())
    judging.set()
    tick_until(rollout, lambda: len(trajectories(stand)) == 8)
    rollout.close()
