"""Results of a check: facts that agree, contradictions, and facts that cannot be checked. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from rlstreams.streams.log.group_ids import SampleId

# Checks, in the order in which facts of a sample arise.
RECORDS = "it was trained as it was sampled"
REWARDS = "its reward is what the run's grader says"
TOKENS = "the scorer found the sampler's log-probs"
SCORES = "so it does now, under the same weights"
ADVANTAGES = "its advantage is that of its group's rewards"
WEIGHTS = "the step, done again, gives its weights"


@dataclass(frozen=True, slots=True, kw_only=True)
class Contradiction:
    """One fact of the log that another fact, or the run's own code, contradicts."""

    check: str
    step: int
    sample: SampleId | None  # None: the contradiction is of the whole step
    message: str  # `recorded 1, the grader says 0`


@dataclass(slots=True, kw_only=True)
class FactCheck:
    """Results for one kind of fact, over all samples that were checked."""

    name: str
    num_agreed: int = 0
    found: list[Contradiction] = field(default_factory=list)
    unchecked: Counter[str] = field(default_factory=Counter)  # number of facts, by reason
    note: str = ""

    def add(self, step: int, sample: SampleId | None, message: str) -> None:
        """Count a fact. A `message` makes it a contradiction; "": the fact agrees."""
        if not message:
            self.num_agreed += 1
            return
        self.found.append(Contradiction(check=self.name, step=step, sample=sample, message=message))


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """Results of all checks over some steps."""

    first: int
    last: int
    num_samples: int
    checks: tuple[FactCheck, ...]

    @property
    def found(self) -> list[Contradiction]:
        """All contradictions, in the order of steps."""
        return sorted((one for c in self.checks for one in c.found), key=lambda one: one.step)

    @property
    def by_group(self) -> dict[str, list[Contradiction]]:
        """Contradictions by group; groups with the most contradictory samples first."""
        groups: dict[str, list[Contradiction]] = {}
        for one in self.found:
            if one.sample is not None:
                groups.setdefault(one.sample.group_id, []).append(one)
        return dict(sorted(groups.items(), key=lambda item: -len(samples_of(item[1]))))

    @property
    def first_step(self) -> int | None:
        """The first step with a contradiction; None: there is none."""
        return min((one.step for one in self.found), default=None)


def samples_of(found: Iterable[Contradiction]) -> set[SampleId]:
    """Return the samples that these contradictions are about."""
    return {one.sample for one in found if one.sample is not None}
