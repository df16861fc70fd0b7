"""Dead letters by reason: their number, and the newest one's detail."""

from __future__ import annotations

import shlex
from dataclasses import dataclass

from rlstreams.streams.samples.fold import Samples


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadReason:
    """Dead letters of one reason."""

    reason: str
    num: int
    newest: str  # worker and detail of the newest; errors of user code have file and line


@dataclass(frozen=True, slots=True)
class DeadState:
    """All reasons, the most frequent first."""

    reasons: tuple[DeadReason, ...] = ()

    @property
    def num(self) -> int:
        """Number of all dead letters."""
        return sum(reason.num for reason in self.reasons)

    def __str__(self) -> str:
        return ", ".join(f"{reason.reason} {reason.num:,}" for reason in self.reasons)


def dead(samples: Samples) -> DeadState:
    """Return a snapshot of the dead letters."""
    reasons = [
        DeadReason(reason=reason, num=letters.num, newest=letters.newest)
        for reason, letters in samples.letters.items()
    ]
    return DeadState(tuple(sorted(reasons, key=lambda found: -found.num)))


def list_command(run: str = "RUN", reason: str = "") -> str:
    """Return the command that lists dead letters.

    Args:
        run: the run's folder.
    """
    return f"rlstreams dead-letters list {shlex.quote(run)}" + (
        f" --reason {reason}" if reason else ""
    )
