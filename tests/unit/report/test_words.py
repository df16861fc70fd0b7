"""What live view, report and summary say in the same words."""

from __future__ import annotations

from pathlib import Path

from rlstreams.schemas.events import PassedOverCheckpoint, StepsRedone
from rlstreams.show.report.page import render_report
from rlstreams.words.house import MEANING
from rlstreams.words.screen import redone_lines
from tests import factories
from tests.unit.report.sample_run import report_input


def redone(first_step: int, last_step: int, *passed: str) -> StepsRedone:
    return factories.steps_redone(
        first_step=first_step,
        last_step=last_step,
        num_equal=last_step - first_step + 1,
        passed_over=tuple(
            PassedOverCheckpoint(checkpoint=name, reason="it is damaged") for name in passed
        ),
    )


def test_a_checkpoint_that_was_passed_over_is_told_beside_the_redo() -> None:
    """Once, however many restarts passed it over; also where no step had to be done again."""
    assert [
        "steps 1 to 3 were done again from the log: 3 of 3 weight hashes equal",
        "checkpoint 000001-00000003 was passed over at a restart: it is damaged",
    ] == redone_lines([redone(1, 3, "000001-00000003"), redone(4, 3, "000001-00000003")])


def test_of_many_the_newest_are_told() -> None:
    """A run of days has hundreds of restarts."""
    events = [redone(n, n, f"checkpoint-{n}") for n in range(1, 8)]
    assert [
        "7 times steps were done again from the log: 7 of 7 weight hashes equal",
        "4 other checkpoints were passed over at restarts",
        *(
            f"checkpoint checkpoint-{n} was passed over at a restart: it is damaged"
            for n in (5, 6, 7)
        ),
    ] == redone_lines(events)


def test_our_own_words_are_explained_where_they_are_shown() -> None:
    """On the report, below the heading; each is a word of the glossary."""
    glossary = (Path(__file__).parents[3] / "infra/docs/glossary.md").read_text("utf-8")
    page = render_report(report_input())
    for word, meaning in MEANING.items():
        assert f"**{word}**" in glossary
        assert f"{meaning[0].upper()}{meaning[1:]}." in page
