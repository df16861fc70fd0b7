"""Which samples to look at: the worst by a measure, or those of a step. Memory does not grow."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """What is looked for."""

    by: Measure | None = None  # None: in the order of the step's batch
    step: int | None = None  # only samples that this step trained on
    limit: int = 10

    def __post_init__(self) -> None:
        if self.limit < 1:
            raise ConfigError(f"limit must be at least 1, got {self.limit}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """One sample, and its value of the measure."""

    sample: SampleId
    value: float


def choose(log: RunLog, query: Query) -> list[Found]:
    """The samples, best match first; at most `query.limit`.

    Raises:
        ConfigError: a step that the log does not have; names those that it has.
        DeadlineError: a partition did not deliver up to its end.
    """
    members = None if query.step is None else _of_step(log, query.step)
    if query.by is None:
        return list(itertools.islice(members or (), query.limit))
    if query.by is Measure.STALENESS:
        return _extreme(_trained(log) if members is None else members, query)
    wanted = None if members is None else frozenset(one.sample for one in members)
    return _extreme(_scanned(log, query, wanted), query)


def _extreme(found: Iterable[Found], query: Query) -> list[Found]:
    """Of a stream, the few at the end that is wanted; of equal ones the earlier."""
    sign = 1.0 if query.by is Measure.REWARD else -1.0
    return heapq.nsmallest(
        query.limit,
        (one for one in found if not math.isnan(one.value)),
        key=lambda one: sign * one.value,
    )


def _trained(log: RunLog) -> Iterator[Found]:
    """Every trained sample with its staleness, in the order of training."""
    for event in log.steps():
        yield from _members(event)


def _of_step(log: RunLog, step: int) -> list[Found]:
    first = last = 0
    for event in log.steps():
        if event.step == step:
            return list(_members(event))
        first, last = first or event.step, event.step
    there = f"it has steps {first} to {last}" if last else "it has no step"
    raise ConfigError(f"step {step} is not in {log.name}: {there}")


def _members(event: StepCompleted) -> Iterator[Found]:
    for ref in event.samples:
        distance = event.policy_version - 1 - ref.oldest_policy_version
        yield Found(sample=SampleId(ref.group_id, ref.sample), value=distance)


def _scanned(log: RunLog, query: Query, wanted: Collection[SampleId] | None) -> Iterator[Found]:
    """Every trajectory that is wanted, with its value."""
    groups = None if wanted is None else {sample.group_id for sample in wanted}
    for trajectory, value in _measured(log, query.by, groups):
        sample = SampleId(trajectory.group_id, trajectory.sample)
        if wanted is None or sample in wanted:
            yield Found(sample=sample, value=value)


def _measured(
    log: RunLog, by: Measure | None, groups: Collection[str] | None
) -> Iterator[tuple[Trajectory, float]]:
    if by is Measure.MISMATCH:
        for scored in log.read(ScoredTrajectory, groups, skip_unreadable=True):
            try:
                yield scored.event.trajectory, mismatch(scored.event)
            except TensorError:
                log.num_unreadable += 1
        return
    for record in log.read(Trajectory, groups, skip_unreadable=True):
        event = record.event
        if by is Measure.REWARD:
            yield event, event.reward
        elif by is Measure.TOKENS:
            sampled = (s for s in event.segments if s.author == "policy")
            yield event, sum(len(segment.token_ids) for segment in sampled)
        else:
            yield event, event.finished_at_ms - event.started_at_ms
