"""What `record` and `replay` say that they did: one is one, and more are more."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlstreams.__main__ import main
from rlstreams.cli import record as record_command
from rlstreams.debug.replay.diff import Summary
from rlstreams.debug.replay.player import PlayedRecords
from rlstreams.debug.replay.record import RecordingOptions, RecordingResult
from rlstreams.debug.replay.scores_again import ScoreReplay
from rlstreams.streams.recording import RecordingManifest
from rlstreams.streams.recording.recorder import RecordingProgress

Said = pytest.CaptureFixture[str]


def made(num: int, *, new: int = 0) -> RecordingResult:
    manifest = RecordingManifest(run="r", started_at_ms=1)
    return RecordingResult(
        manifest=manifest,
        num_records=num,
        num_new=new,
        num_bytes=2_000_000,
        seconds=1.0,
        is_resumed=bool(new),
    )


def test_record_says_how_many_and_how_many_of_them_are_new(capsys: Said) -> None:
    """`num_records` is of the whole recording, also where it was continued."""
    options = RecordingOptions(folder=Path("rec"))
    record_command._print_result(made(1), options)
    record_command._print_result(made(2000, new=3), options)
    said = capsys.readouterr().out
    assert "rec: 1 record, 0.0 MB in Parquet files (2.0 MB read in 1.0 s)" in said
    assert (
        "rec: 2,000 records, 0.0 MB in Parquet files (2.0 MB read in 1.0 s, continued: 3 of" in said
    )
    now = RecordingProgress(num_records=1, num_bytes=0, behind=1)
    assert "1 record, 0.0 MB, 1 offset behind" == record_command._line_of(now)


def test_a_replay_says_what_it_wrote() -> None:
    """One record is one record."""
    played = PlayedRecords(num_records=1, num_bytes=10, seconds=1.0, by_topic={"steps": 1})
    assert ["steps                         1", "1 record, 0.0 MB in 1.0 s (1 a second)"] == (
        played.lines()
    )


def test_scores_again_say_what_was_equal() -> None:
    """And of how many versions there are weights."""
    made = ScoreReplay(num_known=3, scores=Summary(event="", num_equal=1))
    weights, scores = made.lines()
    assert "weights of 3 of 3 versions are available" == weights
    assert scores.startswith("1 scored trajectory equal, bit for bit; 0 different, 0 not scored")
    made = ScoreReplay(num_known=3, missing=[0, 2])
    assert "weights of 1 of 3 versions are available; missing: 0, 2" == made.lines()[0]
    made = ScoreReplay(num_known=1200, missing=range(1100))
    assert made.lines()[0].endswith("; missing: 0, 1, 2, 3, 4, 5, 6, 7, 8, 9 and 1,090 more")


def test_an_option_that_would_be_ignored_is_refused(capsys: Said) -> None:
    """Where a folder for weights is named that none are kept in."""
    assert 78 == main(["replay", "trainer", "no-such-recording", "--as=x"])
    assert "--as: of no use without --keep-weights" in capsys.readouterr().err
