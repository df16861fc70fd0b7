"""Facts of a run's learning and their statistics, and what is said of them. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import StatisticsError, correlation, fmean, pstdev
from typing import Any

from rlstreams.streams.views.evaluation import EvaluationPoint
from rlstreams.streams.views.run import StepPoint

SURE = 3.0  # standard errors of a difference that is no noise
BEFORE = 10  # steps by which chance is judged,
KNOWN = 128  # and groups: the share of ten groups is luck
CHANCE = (
    1e-5  # probability of groups without a signal: a run of small batches asks a thousand times
)
NEVER = 48  # groups without a signal, of a run that had none yet: three steps of the demo
RARELY = 128  # the same, of a run that had one: a signal in fewer teaches nothing
OF_A_GROUP = 8  # samples, in the demo
LEARNT = 0.1  # of the range of rewards
SOLVED = 2.0  # mean reward over its spread: equal groups of such batches earned it all
FALLING = -0.7  # correlation of reward and spread: the better a batch, the less its answers differ
GROUPS_COMPARED = ("grpo", "rloo", "reinforce++baseline", "maxrl")  # advantages within a group


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

    @property
    def compares_groups(self) -> bool:
        """Whether a group of equal rewards has no signal; a group of one learns its bare reward."""
        is_alone = self.get("prompts.group_size") == 1
        return not is_alone and self.get("trainer.loss.advantage") in (None, *GROUPS_COMPARED)

    @property
    def learns_rewards(self) -> bool:
        """Whether rewards say what is better: not with advantages of 1, nor with the user's own,
        of which that is not known."""
        name = self.get("trainer.loss.advantage")
        return name in (None, *GROUPS_COMPARED, "reinforce++", "gae", "reward")


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


def spread_of(steps: Sequence[StepPoint]) -> float:
    """Standard deviation of the reward over all samples of the steps; 0: not known."""
    within = fmean(p.metrics.get("reward_std", 0.0) ** 2 for p in steps)
    return math.sqrt(within + pstdev([p.reward for p in steps]) ** 2) if within else 0.0


def group_error(*windows: Sequence[StepPoint]) -> float:
    """Standard error of the difference of mean rewards if answers to a prompt are all alike and
    the spread is that of all windows: the best one's own is small by luck."""
    spread = math.sqrt(fmean(spread_of(steps) ** 2 for steps in windows))
    return spread * math.sqrt(sum(1 / max(1, sum(p.num_groups for p in w)) for w in windows))


def rises(before: Sequence[StepPoint], after: Sequence[StepPoint]) -> bool:
    """Whether the mean reward rose by more than noise."""
    return mean_reward(after) - mean_reward(before) > SURE * error_of(before, after)


def held_out_error(
    first: EvaluationPoint, last: EvaluationPoint, steps: Sequence[StepPoint]
) -> float:
    """Standard error of the difference of two evaluations."""
    spread = mean_of(steps[:BEFORE], "reward_std")

    def squared(point: EvaluationPoint) -> float:
        of_one = point.accuracy * (1 - point.accuracy) if point.is_right_or_wrong else spread**2
        return of_one / max(1, point.num_samples)

    return math.sqrt(squared(first) + squared(last))


def is_solved(steps: Sequence[StepPoint]) -> bool:
    """Whether answers earn nearly all that can be earned, wherever the reward's zero is."""
    spreads = [p.metrics.get("reward_std", 0.0) for p in steps]
    if mean_reward(steps) > SOLVED * fmean(spreads):
        return True
    try:
        return correlation([p.reward for p in steps], spreads) < FALLING
    except StatisticsError:  # one of the two never changes
        return False


def window_of(steps: Sequence[StepPoint], least: int, *, groups: int = 0, samples: int = 0) -> int:
    """Steps of a window that has so many groups and samples, too, of steps like the last one."""
    of_groups = math.ceil(groups / max(1, steps[-1].num_groups))
    return max(least, of_groups, math.ceil(samples / max(1, steps[-1].num_samples)))


def flat_end(steps: Sequence[StepPoint], *, in_groups: bool) -> Sequence[StepPoint]:
    """The last steps, none of whose groups had a signal, once chance does not explain them.

    It does if they are few groups: of a run without any signal so far, of one whose groups had one
    too rarely, or by the share of such groups before.

    Args:
        in_groups: whether the answers to a prompt are compared with each other. Else the answers
            of a step are, as many as `OF_A_GROUP` in the place of a group.
    """
    first = next((n for n in range(len(steps), 0, -1) if not _is_flat(steps[n - 1], in_groups)), 0)
    flat, before = steps[first:], steps[:first]
    num = sum(p.num_groups if in_groups else p.num_samples / OF_A_GROUP for p in flat)
    if not flat or num >= (RARELY if before else NEVER):
        return flat
    is_chance = not before or _chance_of_flat(flat, before, in_groups) > CHANCE
    return () if is_chance else flat


def _chance_of_flat(
    flat: Sequence[StepPoint], before: Sequence[StepPoint], in_groups: bool
) -> float:
    """Probability that the groups, or steps, of the one have no signal, by those of the other, if
    each share of such groups was equally likely at first (rule of succession)."""
    window = before[-window_of(before, BEFORE, groups=KNOWN) :]
    num, known = (sum(p.num_groups if in_groups else 1 for p in own) for own in (flat, window))
    alike = sum(
        p.num_groups * p.metrics.get("equal_reward_groups", 0.0)
        if in_groups
        else _is_flat(p, in_groups)
        for p in window
    )
    return math.prod((alike + 1 + n) / (known + 2 + n) for n in range(num))


def is_learnt(flat: Sequence[StepPoint], steps: Sequence[StepPoint]) -> bool:
    """Whether steps without a signal earned nearly what the best step did."""
    rewards = [p.reward for p in steps]
    best, worst = max(rewards), min(rewards)
    return best > worst and mean_reward(flat) >= best - LEARNT * (best - worst)


def _is_flat(step: StepPoint, in_groups: bool) -> bool:
    metrics = step.metrics
    is_alike = metrics.get("equal_reward_groups", 0.0) >= 1.0  # each group of one is
    return metrics.get("reward_std") == 0.0 or (in_groups and is_alike)
