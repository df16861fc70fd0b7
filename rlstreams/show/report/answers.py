"""Rows in which answers can be read: prompt, answer, reward and its parts beside each other."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from rlstreams.schemas.events import TRAIN
from rlstreams.show.report.html import clock_time, short
from rlstreams.streams.log.group_ids import group_of
from rlstreams.streams.samples.life import Outcome, Sample
from rlstreams.words.texts import SampleText, parts_line
from rlstreams.words.texts import short as cut

LONGEST = 20_000  # characters of one text in a row; its own page has all
FIGURES = (
    ("tokens", "length"), ("version", "version"), ("staleness", "staleness"),
    ("mismatch", "mismatch"), ("step", "outcome"), ("at_ms", "sampled (UTC)"),
)  # fmt: skip
"""Columns after prompt, answer and reward: the key to sort by, and the title."""


def answer_rows(
    rows: Iterable[Sample], text_of: Callable[[str], SampleText | None]
) -> list[dict[str, Any]]:
    """Rows of samples for the templates.

    Args:
        text_of: of a sample's name; None: its text is not known.
    """
    return [_answer_row(row, text_of(row.name)) for row in rows]


def _answer_row(row: Sample, text: SampleText | None) -> dict[str, Any]:
    reward = row.reward if text is None else text.reward
    return {
        "name": row.name,
        "group": group_of(row.name),
        "purpose": "" if row.purpose == TRAIN else row.purpose,
        "ended": row.ended,
        "prompt": _text(text.prompt if text else None),
        "answer": _text(text.answer if text else None),
        "reward": short(reward),
        "parts": parts_line(text.parts) if text else "",
        "note": text.note if text else "",
        "advantage": short(row.advantage),
        "step": row.group.step if row.outcome is Outcome.TRAINED else 0,
        "figures": [_figure(row, name) for name, _ in FIGURES],
    }


def _figure(row: Sample, name: str) -> str:
    if name == "at_ms":
        return clock_time(row.at_ms)
    return row.after if name == "step" else short(getattr(row, name))


def _text(whole: str | None) -> dict[str, str]:
    """The text as it is shown at first, and all of it if that is more; `-`: not known."""
    if whole is None:
        return {"cut": "-", "whole": ""}
    shown = cut(whole)
    return {"cut": shown or "(empty)", "whole": "" if shown == whole else whole[:LONGEST]}
