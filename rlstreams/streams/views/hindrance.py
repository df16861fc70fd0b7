"""Facts of a run's learning and their statistics, and what is said of them. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, pstdev
from typing import Any

from rlstreams.streams.views.evaluation import EvaluationPoint
from rlstreams.streams.views.run import StepPoint

SURE = 3.0  # standard errors of a difference that is no noise


@dataclass(frozen=True, slots=True, kw_only=True)
class Hindrance:
    """A cause that keeps a run from learning."""

    cause: str
    evidence: str  # with the figures
    cure: str  # what to set, or to look at

    def __str__(self) -> str:
        return f"{self.cause}: {self.evidence}; {self.cure}"


@dataclass(frozen=True, slots=True, kw_only=True)
class LearningFacts:
    """All that the checks look at."""

    steps: Sequence[StepPoint]
    held_out: Sequence[EvaluationPoint]
    measure: str  # name of the held-out mean
    cut: Mapping[int, float]  # share of a step's answers that were cut at their length, by step
    config: Mapping[str, Any]  # of the newest claim; empty: not known

    def get(self, name: str) -> Any:  # noqa: ANN401
        """Value of a field; None: not known."""
        found: Any = self.config
        for part in name.split("."):
            found = found.get(part) if isinstance(found, Mapping) else None
        return found

    def setting(self, name: str) -> str:
        """`field is value`, or the field alone."""
        value = self.get(name)
        return f"{name} (now {value:g})" if isinstance(value, int | float) else name


def mean_of(steps: Sequence[StepPoint], name: str, absent: float = 0.0) -> float:
    """Mean of a metric over steps."""
    return fmean(p.metrics.get(name, absent) for p in steps)


def mean_staleness(steps: Sequence[StepPoint]) -> float:
    """Mean distance of the trained tokens, in versions."""
    tokens = sum(sum(p.staleness.values()) for p in steps)
    return sum(n * num for p in steps for n, num in p.staleness.items()) / max(1, tokens)


def mean_reward(steps: Sequence[StepPoint]) -> float:
    """Mean reward of steps."""
    return fmean(p.reward for p in steps)


def inspect_command(steps: Sequence[StepPoint]) -> str:
    """Command that shows the answers of the last of these steps."""
    return f"rlstreams inspect --step {steps[-1].step} RUN"


def error_of(*windows: Sequence[StepPoint]) -> float:
    """Standard error of the difference of mean rewards: of samples, or of steps if they differ
    more."""
    found = 0.0
    for steps in windows:
        num = sum(p.num_samples for p in steps)
        of_samples = mean_of(steps, "reward_std") ** 2 / max(1, num)
        of_steps = pstdev([p.reward for p in steps]) ** 2 / max(1, len(steps) - 1)
        found += max(of_samples, of_steps)
    return math.sqrt(found)


def rises(before: Sequence[StepPoint], after: Sequence[StepPoint]) -> bool:
    """Whether the mean reward rose by more than noise."""
    return mean_reward(after) - mean_reward(before) > SURE * error_of(before, after)
