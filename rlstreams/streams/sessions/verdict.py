"""The verdict on a session of the graders that a run waits for. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from rlstreams.schemas.calls import EXPIRED, REWARD
from rlstreams.schemas.events import OutcomeReported
from rlstreams.streams.sessions.session import Session


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """A session's reward, or why it has none."""

    kind: str  # REWARD; EXPIRED; the kind of failure that a grader reported
    reward: float = 0.0
    parts: dict[str, float] = field(default_factory=dict)
    note: str = ""
    terminal: str | None = None  # the call whose answer was judged
    missing: tuple[str, ...] = ()  # graders without an outcome


def verdict_of(session: Session, graders: Sequence[str], *, is_over: bool) -> Verdict | None:
    """Return the verdict of these graders together; None: one of them has no outcome yet.

    Each grader's newest standing outcome counts. Their rewards are added; of several graders each
    is a part of its own name. One that failed decides alone: there is no reward without it.

    Args:
        is_over: whether the wait for graders is over.
    """
    said = {one.grader: one for one in session.standing if one.grader in graders}
    for one in said.values():
        if one.kind != REWARD:
            return Verdict(kind=one.kind, note=f"{one.grader}: {one.kind} {one.note}".strip())
    missing = tuple(name for name in graders if name not in said)
    if missing:
        note = f"no outcome by {', '.join(missing)}"
        return Verdict(kind=EXPIRED, note=note, missing=missing) if is_over else None
    every = [said[name] for name in graders]
    parts = every[0].parts if len(every) == 1 else _parts(every)
    return Verdict(
        kind=REWARD,
        reward=sum(one.reward for one in every),
        parts=dict(parts),
        note="; ".join(one.note for one in every if one.note),
        terminal=session.terminal,
    )


def _parts(every: Sequence[OutcomeReported]) -> dict[str, float]:
    found = {one.grader: one.reward for one in every}
    for one in every:
        found |= {f"{one.grader}.{name}": value for name, value in one.parts.items()}
    return found
