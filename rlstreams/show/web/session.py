"""A session as the page of its sample shows it: texts first, figures beside them. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rlstreams.streams.sessions.figures import (
    CallFigures,
    OutcomeFigures,
    Said,
    SessionFigures,
    Words,
    session_figures,
)
from rlstreams.streams.sessions.session import Session
from rlstreams.words.session_text import call_line, outcome_line, sample_line, start_line
from rlstreams.words.texts import short

LEVELS = 4  # branches within branches that are set in; deeper ones are beside the last
OPEN = "open"


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownSession:
    """A session as the template prints it."""

    figures: SessionFigures
    rows: list[ShownCall]
    starts: list[tuple[str, bool]]  # in words, and whether it was lost
    outcomes: list[tuple[str, str, str]]  # in words, its note; "standing", "late", "": replaced
    sample: str  # the share of the session that is learnt from

    @property
    def is_open(self) -> bool:
        """Whether calls may follow."""
        return self.figures.state == OPEN


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownCall:
    """A call as a row that unfolds."""

    call: CallFigures
    level: int
    place: str  # where it stands in the sample
    line: str  # its figures
    cut: list[tuple[str, str]]  # role and text, a line each
    whole: list[tuple[str, str, str]]  # the same in full: role, kind of text, text


def shown_session(session: Session, words: Words) -> ShownSession:
    """A session for the template."""
    figures = session_figures(session, words)
    return ShownSession(
        figures=figures,
        rows=[_row(call) for call in figures.calls],
        starts=[(start_line(start), start.is_lost) for start in figures.starts],
        outcomes=[(outcome_line(one), one.note, _mark(one)) for one in figures.outcomes],
        sample=sample_line(figures),
    )


def _mark(outcome: OutcomeFigures) -> str:
    if not outcome.is_standing:
        return ""
    return "late" if (outcome.after_s or 0.0) > 0 else "standing"


def _row(call: CallFigures) -> ShownCall:
    said = [*call.asked, *([call.answer] if call.answer else [])]
    place = "learnt" if call.is_delivered else "read" if call.is_in_sample else "beside"
    return ShownCall(
        call=call,
        level=min(call.level, LEVELS),
        place=place,
        line=call_line(call),
        cut=[(one.role, _cut(one)) for one in said],
        whole=[(one.role, kind, text) for one in said for kind, text in _whole(one)],
    )


def _cut(said: Said) -> str:
    return short(" ".join([said.text, *said.tools])) or short(said.thought) or "(empty)"


def _whole(said: Said) -> Iterator[tuple[str, str]]:
    if said.thought:
        yield "thinks", said.thought
    if said.text or not (said.tools or said.thought):
        yield "", said.text or "(empty)"
    for tool in said.tools:
        yield "calls", tool
