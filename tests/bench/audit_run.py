"""A finished run of any length for the bench of the audit: only ids differ, payloads are shared."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np

from rlstreams.schemas import encode
from rlstreams.schemas.events import (
    ClosedGroups,
    Event,
    PartitionPosition,
    PolicyPublished,
    ScoredTrajectory,
    SegmentScore,
    StepCompleted,
    Tensor,
)
from rlstreams.streams.log.topics import (
    POLICY_PULLS,
    POLICY_VERSIONS,
    PROMPTS,
    SCORED,
    TRAJECTORIES,
    Topic,
)
from tests.bench.codec import payload
from tests.factories import (
    HASH,
    policy_loaded,
    policy_published,
    prompt,
    sample_ref,
    step_completed,
    trainer_started,
)

GROUP_SIZE, GROUPS_PER_STEP = 8, 16
PER_STEP = GROUP_SIZE * GROUPS_PER_STEP
NUM_TOKENS = 1024
NUM_WORKERS = 16
POOL = 64  # different payloads that take turns
CONFIG = json.dumps({"trainer": {"max_staleness": 1}})


class SyntheticRun:
    """`num_samples` samples, all trained in order, `PER_STEP` a step, one version behind."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples
        self.num_steps = -(-num_samples // PER_STEP)

    def version_of(self, number: int) -> int:
        """That sampled it: the one before the one that its step trains."""
        return max(0, number // PER_STEP - 1)

    def value(self, topic: Topic, number: int, of: tuple[int, int] = (0, 0)) -> bytes:
        """The record of a sample in one of the three large topics.

        Args:
            of: of a score, partition and offset of its trajectory.
        """
        event: Any = _event(topic, number % POOL, self.version_of(number))
        group, sample = divmod(number, GROUP_SIZE)
        names = {"group_id": str(group), "sample": sample}
        if topic is SCORED:
            at = {"trajectory_partition": of[0], "trajectory_offset": of[1]}
            event = replace(event, trajectory=replace(event.trajectory, **names), **at)
        else:
            event = replace(event, **names)
        return b"".join(encode(event))

    def weights(self) -> Iterator[tuple[Topic, Event]]:
        """Each version published, and loaded by every worker."""
        for version in range(self.num_steps + 1):
            published: PolicyPublished = policy_published(version, weight_hash=_hash(version))
            yield POLICY_VERSIONS, published
            for worker in range(NUM_WORKERS):
                loaded: Any = policy_loaded(
                    version,
                    worker=f"rollout-{worker}",
                    load_id=f"rollout-{worker}/{version}",
                    weight_hash=_hash(version),
                )
                yield POLICY_PULLS, loaded

    def steps(self) -> Iterator[bytes]:
        """The records of `steps` where scores lie in one partition, in order."""
        yield b"".join(encode(_claim()))
        for step in range(1, self.num_steps + 1):
            numbers = self._numbers(step)
            yield b"".join(encode(self._step(step, [(0, number) for number in numbers])))

    def step_events(self, scored_at: Sequence[tuple[int, int]]) -> Iterator[Event]:
        """The same for scores at these partitions and offsets."""
        yield _claim()
        for step in range(1, self.num_steps + 1):
            numbers = self._numbers(step)
            yield self._step(step, scored_at[numbers.start : numbers.stop])

    def _numbers(self, step: int) -> range:
        return range((step - 1) * PER_STEP, min(step * PER_STEP, self.num_samples))

    def _step(self, step: int, places: Sequence[tuple[int, int]]) -> StepCompleted:
        first = (step - 1) * PER_STEP
        refs = tuple(
            sample_ref(
                str((first + index) // GROUP_SIZE),
                (first + index) % GROUP_SIZE,
                partition=partition,
                offset=offset,
                oldest_policy_version=self.version_of(first),
            )
            for index, (partition, offset) in enumerate(places)
        )
        closed = ClosedGroups(watermark=-(-(first + len(places)) // GROUP_SIZE))
        event: StepCompleted = step_completed(
            step,
            samples=refs,
            masked=(),
            absent=(),
            closed=closed,
            weight_hash=_hash(step),
            previous_hash=_hash(step - 1),
            positions=(PartitionPosition(topic=SCORED.name, partition=0, offset=0),),
        )
        return event


def _claim() -> Event:
    claim: Event = trainer_started(config=CONFIG, weight_hash=_hash(0))
    return claim


def _hash(version: int) -> str:
    return HASH[:32] + f"{version:032x}"


@lru_cache(maxsize=6 * POOL)
def _event(topic: Topic, number: int, version: int) -> Event:
    """Its group and sample are to be replaced."""
    if topic is PROMPTS:
        issued: Event = prompt(group_size=GROUP_SIZE)
        return issued
    event, _ = payload(number, NUM_TOKENS)
    worker = f"rollout-{number % NUM_WORKERS}"
    first, policy = event.segments
    policy = replace(
        policy,
        policy_version=version,
        weight_hash=_hash(version),
        load_id=f"{worker}/{version}",
    )
    finished_ms = policy_loaded(version).loaded_at_ms
    event = replace(
        event,
        segments=(first, policy),
        worker=worker,
        finished_at_ms=finished_ms,
    )
    if topic is TRAJECTORIES:
        return event
    proximal = Tensor.of(np.zeros(NUM_TOKENS, np.float32))
    score = SegmentScore(
        segment=1,
        anchor="sampled",
        policy_version=version,
        proximal_logprobs=proximal,
        entropy=proximal,
        weight_hash=_hash(version),
        load_id=f"logprob-0/{version}",
    )
    return ScoredTrajectory(trajectory=event, scores=(score,), worker="logprob-0", scored_at_ms=1)
