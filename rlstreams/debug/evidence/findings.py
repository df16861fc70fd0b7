"""What a check found: how many agree, what contradicts itself, and what cannot be checked. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

Name = tuple[str, int]
"""Group and number of a sample."""

# Checks, in the order in which facts of a sample arise.
RECORDS = "it was trained as it was sampled"
REWARDS = "its reward is what the run's grader says"
TOKENS = "the scorer found the sampler's log-probs"
SCORES = "so it does now, under the same weights"
ADVANTAGES = "its advantage is that of its group's rewards"
WEIGHTS = "the step, done again, gives its weights"


@dataclass(frozen=True, slots=True, kw_only=True)
class Contradiction:
    """One fact of the log that another one, or the run's own code, gainsays."""

    check: str
    step: int
    sample: Name | None  # None: of the whole step
    told: str  # `recorded 1, the grader says 0`


@dataclass(slots=True, kw_only=True)
class Check:
    """One kind of fact, of all samples that were looked at."""

    name: str
    num_agreed: int = 0
    found: list[Contradiction] = field(default_factory=list)
    unchecked: Counter[str] = field(default_factory=Counter)  # why not, and how many
    note: str = ""

    def add(self, step: int, sample: Name | None, told: str) -> None:
        """A contradiction; "": it agrees."""
        if not told:
            self.num_agreed += 1
            return
        self.found.append(Contradiction(check=self.name, step=step, sample=sample, told=told))


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """Of some steps."""

    first: int
    last: int
    num_samples: int
    checks: tuple[Check, ...]

    @property
    def found(self) -> list[Contradiction]:
        """All contradictions, in the order of steps."""
        return sorted((one for c in self.checks for one in c.found), key=lambda one: one.step)

    @property
    def by_group(self) -> dict[str, list[Contradiction]]:
        """By group; those with most contradictory samples first."""
        groups: dict[str, list[Contradiction]] = {}
        for one in self.found:
            if one.sample is not None:
                groups.setdefault(one.sample[0], []).append(one)
        return dict(sorted(groups.items(), key=lambda item: -len(samples_of(item[1]))))

    @property
    def first_step(self) -> int | None:
        """The first with a contradiction."""
        return min((one.step for one in self.found), default=None)


def samples_of(found: Iterable[Contradiction]) -> set[Name]:
    """Whom they are about."""
    return {one.sample for one in found if one.sample is not None}
