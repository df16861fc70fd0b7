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
