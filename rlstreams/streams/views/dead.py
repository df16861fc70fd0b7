"""Dead letters by reason: how many there are of each, and what the newest one says."""

from __future__ import annotations

from dataclasses import dataclass

from rlstreams.streams.samples.fold import Samples


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadReason:
    """What was set aside for one reason."""

    reason: str
    num: int
    newest: str  # who set it aside, and its detail: of user code with file and line


@dataclass(frozen=True, slots=True)
class DeadState:
    """All reasons, the most frequent first."""

    reasons: tuple[DeadReason, ...] = ()

    @property
    def num(self) -> int:
        """All dead letters."""
        return sum(reason.num for reason in self.reasons)

    def __str__(self) -> str:
        return ", ".join(f"{reason.reason} {reason.num:,}" for reason in self.reasons)


def dead(samples: Samples) -> DeadState:
    """A snapshot."""
    reasons = [
        DeadReason(reason=reason, num=letters.num, newest=letters.newest)
        for reason, letters in samples.letters.items()
    ]
    return DeadState(tuple(sorted(reasons, key=lambda found: -found.num)))


def list_command(run: str = "RUN", reason: str = "") -> str:
    """How to list them.

    Args:
        run: its folder.
    """
    return f"rlstreams dead-letters list {run}" + (f" --reason {reason}" if reason else "")
