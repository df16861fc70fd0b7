"""Which samples to look at: the worst by a measure, or those of a step. Memory does not grow."""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection, Iterable, Iterator
from enum import StrEnum
from typing import TypeAlias

from rlstreams.schemas.events import ScoredTrajectory, StepCompleted, TensorError, Trajectory
from rlstreams.streams.lineage.fold import SampleId
from rlstreams.streams.lineage.tokens import mismatch
from rlstreams.streams.log.errors import ConfigError
from rlstreams.streams.run.run_log import RunLog


class Measure(StrEnum):
    """What samples are ranked by."""

    MISMATCH = "mismatch"  # largest token difference of proximal and behavior log-prob, nats
    REWARD = "reward"  # the only one whose lowest is the worst
    STALENESS = "staleness"  # of its oldest trained segment, versions
    TOKENS = "tokens"  # sampled by the policy
    DURATION = "duration"  # of the rollout, ms


Valued: TypeAlias = tuple[SampleId, float]  # a sample, and its value of the measure


def choose(
    log: RunLog, *, by: Measure | None = None, step: int | None = None, limit: int = 10
) -> list[SampleId]:
    """The samples, best match first; at most `limit`.

    Args:
        by: None: in the order of the step's batch.
        step: only samples that this step trained on; None: all.

    Raises:
        ConfigError: a step that the log does not have; names those that it has. No limit.
        DeadlineError: a partition did not deliver up to its end.
    """
    if limit < 1:
        raise ConfigError(f"limit must be at least 1, got {limit}")
    members = None if step is None else _of_step(log, step)
    if by is None:
        return [sample for sample, _ in (members or [])[:limit]]
    if by is Measure.STALENESS:
        found = (one for event in log.steps() for one in _members(event))
        return _extreme(found if members is None else members, by, limit)
    wanted = None if members is None else {sample for sample, _ in members}
    found = (one for one in _measured(log, by, wanted) if wanted is None or one[0] in wanted)
    return _extreme(found, by, limit)


def _extreme(found: Iterable[Valued], by: Measure, limit: int) -> list[SampleId]:
    """Of a stream, the few at the end that is wanted; of equal ones the earlier."""
    sign = 1.0 if by is Measure.REWARD else -1.0
    numbers = (one for one in found if not math.isnan(one[1]))
    few = heapq.nsmallest(limit, numbers, key=lambda one: sign * one[1])
    return [sample for sample, _ in few]


def _of_step(log: RunLog, step: int) -> list[Valued]:
    first = last = 0
    for event in log.steps():
        if event.step == step:
            return _members(event)
        first, last = first or event.step, event.step
    there = f"it has steps {first} to {last}" if last else "it has no step"
    raise ConfigError(f"step {step} is not in {log.name}: {there}")


def _members(event: StepCompleted) -> list[Valued]:
    """A step's samples in their order, each with its staleness."""
    base = event.policy_version - 1
    return [
        (SampleId(ref.group_id, ref.sample), base - ref.oldest_policy_version)
        for ref in event.samples
    ]


def _measured(log: RunLog, by: Measure, wanted: Collection[SampleId] | None) -> Iterator[Valued]:
    groups = None if wanted is None else {sample.group_id for sample in wanted}
    if by is Measure.MISMATCH:
        for scored in log.read(ScoredTrajectory, groups, skip_unreadable=True):
            try:
                yield _id(scored.event.trajectory), mismatch(scored.event)
            except TensorError:
                log.num_unreadable += 1
        return
    for record in log.read(Trajectory, groups, skip_unreadable=True):
        event = record.event
        if by is Measure.REWARD:
            yield _id(event), event.reward
        elif by is Measure.TOKENS:
            sampled = (s for s in event.segments if s.author == "policy")
            yield _id(event), sum(len(segment.token_ids) for segment in sampled)
        else:
            yield _id(event), event.finished_at_ms - event.started_at_ms


def _id(event: Trajectory) -> SampleId:
    return SampleId(event.group_id, event.sample)
