"""The samples of some steps in sets, one of which may be to blame."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rlstreams.debug.blame import KINDS
from rlstreams.schemas.events import SessionOpened, StepCompleted, Trajectory, WorkerReport
from rlstreams.streams.log.errors import ConfigError
from rlstreams.streams.log.group_ids import SampleId, sample_name
from rlstreams.streams.run.run_log import RunLog
from rlstreams.workers.trainer.intake.payloads import Payload

Batches = Mapping[int, tuple[StepCompleted, Sequence[Payload]]]
"""Event and samples, in batch order, of each step, by its number."""
VALUES = 8  # different rewards up to which each makes a set; of more, each quarter makes one


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleSet:
    """Samples that are left out together."""

    name: str  # `group 12`, `worker rollout-0`
    samples: frozenset[SampleId]


def name_of(payload: Payload) -> SampleId:
    """Return the sample's identity."""
    return SampleId.of(payload.scored.trajectory)


def sets_of(by: str, batches: Batches, steps: range, log: RunLog) -> list[SampleSet]:
    """Return the samples of these steps, each in one set, in the order in which they were trained.

    Args:
        by: one of `KINDS`.

    Raises:
        ConfigError: the log lacks that fact of a sample, or all samples are of one set.
    """
    trajectories = [p.scored.trajectory for step in steps for p in batches[step][1]]
    key = _keys(by, trajectories, log)
    found: dict[str, set[SampleId]] = {}
    for one in trajectories:
        value = key(one)
        if not value:
            raise ConfigError(
                f"--by {by}: the log does not say which {by} sample {sample_name(one)} "
                f"is of; take another of {', '.join(KINDS)}"
            )
        found.setdefault(f"{by} {value}", set()).add(SampleId.of(one))
    if len(found) < 2:
        raise ConfigError(
            f"--by {by}: all {len(trajectories)} samples of these steps are of "
            f"{next(iter(found), 'none')}, so there is nothing to choose among"
        )
    return [SampleSet(name=name, samples=frozenset(own)) for name, own in found.items()]


def _keys(by: str, found: Sequence[Trajectory], log: RunLog) -> Callable[[Trajectory], str]:
    """Return a function from sample to the value of its set; "": the log does not say."""
    if by == "agent":
        agents = {
            SampleId.of(one.event): one.event.agent
            for one in log.read(SessionOpened, skip_unreadable=True)
        }
        return lambda one: agents.get(SampleId.of(one), "")
    if by == "host":
        hosts = {
            (one.event.worker, one.event.instance): one.event.host
            for one in log.read(WorkerReport, skip_unreadable=True)
        }
        return lambda one: hosts.get((one.worker, one.instance), "")
    if by == "reward":
        rewards = [one.reward for one in found]
        if len(set(rewards)) <= VALUES:
            return lambda one: f"{one.reward:g}"
        borders = np.quantile(rewards, (0.25, 0.5, 0.75)).tolist()
        texts = [f"up to {border:g}" for border in borders] + [f"above {borders[-1]:g}"]
        return lambda one: texts[sum(one.reward > border for border in borders)]
    simple: Mapping[str, Callable[[Trajectory], str]] = {
        "group": lambda one: one.group_id,
        "row": lambda one: str(one.row),
        "worker": lambda one: one.worker,
    }
    return simple[by]


def rewards_of(path: Path) -> dict[SampleId, float]:
    """Read another grader's rewards: JSON lines with `group_id`, `sample` and `reward`, as
        `rlstreams export samples` writes them.

    Raises:
        ConfigError: a line without these, or with a reward that is no finite number; names it.
        OSError: the file cannot be read.
    """
    found: dict[SampleId, float] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            said = json.loads(line)
            name = SampleId(str(said["group_id"]), int(said["sample"]))
            reward = float(said["reward"])
        except (ValueError, KeyError, TypeError) as err:
            raise ConfigError(
                f"--rewards {path}, line {number}: it must be an object with group_id, sample and "
                f"reward, got {line[:80]!r}"
            ) from err
        if not math.isfinite(reward):
            raise ConfigError(f"--rewards {path}, line {number}: reward is {reward}")
        found[name] = reward
    if not found:
        raise ConfigError(f"--rewards {path}: no line in it")
    return found
