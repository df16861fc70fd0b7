"""The section of a configuration about outcomes that come after a session's end."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rlstreams.workers.config.checks import PositiveFloat, Section


@dataclass(frozen=True, slots=True, kw_only=True)
class OutcomeSection(Section, section="outcome"):
    """Rewards that others give, after an agent's session."""

    wait_for: tuple[str, ...] = ()
    """Graders, as their outcomes name them: the sum of their rewards is the sample's, which is
    written when all have spoken. Empty: `reward.verifier` judges at once."""
    deadline_s: PositiveFloat = 600.0
    """Time limit from a session's end to the last of these outcomes; then it is set aside."""

    def _problems(self) -> Iterator[str]:
        if twice := sorted({name for name in self.wait_for if self.wait_for.count(name) > 1}):
            yield f"outcome.wait_for names {twice[0]!r} twice"
        if "" in self.wait_for:
            yield "outcome.wait_for has an empty name: no outcome has such a grader"

    @property
    def late_s(self) -> float:
        """How long a sample may wait after its session; 0: nobody is waited for."""
        return self.deadline_s if self.wait_for else 0.0


def outcome_problems(outcome: OutcomeSection, *, has_agents: bool) -> Iterator[str]:
    """What goes with agents alone."""
    if outcome.wait_for and not has_agents:
        yield "[outcome.wait_for], but there is no table [[agent]]: outcomes are of sessions"


def late_problems(outcome: OutcomeSection, group_s: float, sample_s: float) -> Iterator[str]:
    """What would drop a group before its graders have spoken."""
    if outcome.wait_for and group_s < sample_s + outcome.late_s:
        yield (
            "[trainer.group_deadline_s], but [outcome.deadline_s]: a group's clock starts with its "
            "first scored sample, and would drop it while siblings wait for their graders; set at "
            f"least {sample_s + outcome.late_s:g}, or a shorter outcome.deadline_s"
        )
