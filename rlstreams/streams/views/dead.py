"""Dead letters by reason: how many there are of each, and what the newest one says."""

from __future__ import annotations

from dataclasses import dataclass

from rlstreams.schemas.events import DeadLetter, Event


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


class DeadView:
    """The fold of `dead-letters`."""

    def __init__(self) -> None:
        self._reasons: dict[str, DeadReason] = {}

    def apply(self, event: Event) -> None:
        """Take one event; what is no dead letter is passed by."""
        if isinstance(event, DeadLetter):
            known, newest = self._reasons.get(event.reason), f"{event.worker}: {event.detail}"
            num = known.num + 1 if known else 1
            self._reasons[event.reason] = DeadReason(reason=event.reason, num=num, newest=newest)

    @property
    def state(self) -> DeadState:
        """A snapshot."""
        return DeadState(tuple(sorted(self._reasons.values(), key=lambda found: -found.num)))


def list_command(run: str = "RUN", reason: str = "") -> str:
    """How to list them.

    Args:
        run: its folder.
    """
    return f"rlstreams dead-letters list {run}" + (f" --reason {reason}" if reason else "")
