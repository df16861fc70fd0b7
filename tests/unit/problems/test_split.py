"""Held-out rows: kept out of one file by content, or a file of their own that is compared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rlstreams.streams.log.errors import ConfigError
from tests.unit.problems.rows import everything, problems, write

ROWS = [{"prompt": f"problem {number}"} for number in range(40)]


def split(file: str, **data: Any) -> tuple[list[Any], list[Any]]:
    found = problems(train=file, **data)
    assert found.held_out is not None
    return everything(found.train), everything(found.held_out)


@pytest.mark.parametrize("share", [{"held_out_rows": 7}, {"held_out_fraction": 0.25}])
def test_rows_are_kept_out(tmp_path: Path, share: dict[str, Any]) -> None:
    """Every row is on one side; which, is decided by what it asks and not by where it stands."""
    train, held_out = split(write(tmp_path, *ROWS), **share)
    assert sorted(row["prompt"] for row in ROWS) == sorted(train + held_out)
    assert len(held_out) == share.get("held_out_rows", len(held_out))
    assert 0 < len(held_out) < 20
    again = split(write(tmp_path, *reversed(ROWS), name="turned.jsonl"), **share)
    assert set(held_out) == set(again[1])


def test_copies_never_end_on_both_sides(tmp_path: Path) -> None:
    """A held-out row is held out once, and the run is told what became of its copies."""
    file = write(tmp_path, *ROWS, *ROWS[:20], {"prompt": "problem 3", "answer": "other"})
    train, held_out = split(file, held_out_rows=30)
    assert not set(train) & set(held_out)
    assert 30 == len(held_out)
    left_out = 61 - len(train) - 30
    told = problems(train=file, held_out_rows=30).summary[0]
    parts = f"{len(train)} for training, 30 held out, {left_out} skipped as copies of held-out"
    assert told.endswith(f"61 rows: {parts} prompts")


@pytest.mark.parametrize(
    ("share", "told"),
    [
        ({"held_out_rows": 40}, r"held_out_rows is 40: of 40 different prompts .* hold out 40"),
        ({"held_out_fraction": 1e-6}, r"held_out_fraction is 1e-06: .* hold out 0; both splits"),
    ],
)
def test_an_empty_split_is_refused(tmp_path: Path, share: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        problems(train=write(tmp_path, *ROWS), **share)


def test_files_that_overlap_are_refused(tmp_path: Path) -> None:
    """By what is asked, whatever else the rows say; both places are named."""
    train = write(tmp_path, *ROWS)
    held_out = write(
        tmp_path, {"prompt": "new"}, {"prompt": "problem 5", "answer": "?"}, name="held.jsonl"
    )
    told = r"1 of 2 prompts are in data\.train too, first .*held\.jsonl:2, which is .*rows\.jsonl:6"
    with pytest.raises(ConfigError, match=told):
        problems(train=train, held_out=held_out)


def test_two_ways_to_hold_out_are_one_too_many(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"data\.held_out_rows and data\.held_out_fraction are both"
    ):
        problems(train=write(tmp_path, *ROWS), held_out_rows=3, held_out_fraction=0.1)
