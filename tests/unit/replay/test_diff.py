"""Comparing two accounts of a run."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from rlstreams.debug.replay.diff import Summary, diff, lines
from rlstreams.schemas.events import Event
from rlstreams.streams.recording import Recording
from tests import factories
from tests.unit.recording.recordings import raw_of, record


def summaries(folder: Path, one: Iterable[Event], other: Iterable[Event]) -> list[Summary]:
    for name, events in (("one", one), ("other", other)):
        record(folder / name, [raw_of(event, n) for n, event in enumerate(events)])
    with Recording(folder / "one") as left, Recording(folder / "other") as right:
        return diff(left, right)


def scored(sample: int, value: float = -0.5, **changes: object) -> Event:
    made = factories.scored(factories.trajectory(sample=sample), **changes)
    score = replace(made.scores[0], proximal_logprobs=factories.float32s(3, value))
    return replace(made, scores=(score,))


def test_who_when_and_where_are_left_out(tmp_path: Path) -> None:
    """Two runs of the same make are equal."""
    again = [
        scored(1, worker="logprob-7", instance="z", scored_at_ms=5, trajectory_offset=9, window=3)
    ]

    (found,) = summaries(tmp_path, [scored(1)], again)

    assert (1, 0) == (found.num_equal, found.num_different)


def test_the_first_difference_is_shown_in_its_place(tmp_path: Path) -> None:
    """With the sample, the field, the values around, and how many differ."""
    (found,) = summaries(
        tmp_path, [scored(0), scored(1), scored(2)], [scored(0), scored(1, -0.25), scored(2)]
    )
    text = "\n".join(lines([found]))

    assert (2, 1) == (found.num_equal, found.num_different)
    assert "first different ScoredTrajectory: sample 7/1" in text
    assert "scores[0].proximal_logprobs[0]: -0.5  and  -0.25" in text
    assert "3 differ" in text
    assert "scores.proximal_logprobs: in 1, at most 0.25 apart" in text


def test_only_numbers_are_some_way_apart(tmp_path: Path) -> None:
    """Of a name, or of arrays of two lengths, it is said in how many records they differ."""
    made = factories.scored(factories.trajectory())
    score = replace(made.scores[0], weight_hash="b", proximal_logprobs=factories.float32s(9, -0.5))
    (found,) = summaries(tmp_path, [made], [replace(made, scores=(score,))])
    assert {"scores.weight_hash": 0.0, "scores.proximal_logprobs": 0.0} == found.gaps
    assert {"  scores.weight_hash: in 1", "  scores.proximal_logprobs: in 1"} <= {*lines([found])}


def test_missing_and_extra_records_are_counted(tmp_path: Path) -> None:
    """By what they are about, not by where they lie; the first of a sample counts."""
    twice = [scored(0), scored(0, -0.1), scored(1)]

    (found,) = summaries(tmp_path, twice, [scored(2), scored(0)])

    assert (1, 0, 1, 1) == (
        found.num_equal,
        found.num_different,
        found.missing,
        found.extra,
    )
    assert not found.is_equal
