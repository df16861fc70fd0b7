"""The role that gets a shared device next, and the end of its holder's shift. Pure.

Downstream first: what was sampled is scored and what was scored is trained before more is sampled,
so a version is in use for as short a time as can be. The holder goes on until it has nothing left,
with two exceptions: when far more waits downstream than it has left, the long tail of its work is
cut; and after its longest shift the device goes to any role with work.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

DOWNSTREAM_FIRST = ("trainer", "logprob", "judge", "rollout")
TAIL = 8  # so many times more must wait downstream before a holder with work is interrupted


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """Demand of a role for the device."""

    samples: int  # that wait for the role
    is_starting: bool = False  # it never had its memory: its start is waited for, not its work

    @property
    def is_any(self) -> bool:
        """Whether the role has a use for the device."""
        return self.is_starting or self.samples > 0

    def __str__(self) -> str:
        return "its start" if self.is_starting else f"{self.samples} samples"


def next_role(demands: Mapping[str, Demand]) -> str:
    """Return the role that gets a free device; "": no role has a use for it."""
    asking = [role for role in DOWNSTREAM_FIRST if role in demands and demands[role].is_any]
    return min(asking, key=lambda role: not demands[role].is_starting, default="")


def why_recall(
    holder: str,
    held_s: float,
    demands: Mapping[str, Demand],
    *,
    shift_s: float,
    longest_shift_s: float,
    is_idle: bool,
) -> str:
    """Why the shift of `holder`, a role, ends now; "": it goes on.

    Args:
        held_s: how long it has had the device.
        demands: of all roles of the device that have a process; the holder may be absent.
        shift_s, longest_shift_s: of the device; a holder with nothing left ends before either.
        is_idle: it has had nothing to do for a while, whatever is counted.
    """
    others = {role: demand for role, demand in demands.items() if role != holder}
    role = next_role(others)
    own = demands[holder].samples if holder in demands else 0
    if not role or (own and held_s < shift_s):
        return ""
    if is_idle or not own:
        return f"{holder} has nothing to do, {role} waits for {others[role]}"
    if held_s >= longest_shift_s:
        return f"{holder} had its longest shift, {role} waits for {others[role]}"
    is_downstream = DOWNSTREAM_FIRST.index(role) < DOWNSTREAM_FIRST.index(holder)
    if others[role].is_starting or (is_downstream and others[role].samples >= TAIL * own):
        return f"{holder} has {own} samples left, {role} waits for {others[role]}"
    return ""
