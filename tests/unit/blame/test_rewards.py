"""Another grader's rewards, as a file gives them."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlstreams.debug.blame.sets import rewards_of
from rlstreams.streams.log.errors import ConfigError


def test_lines_of_an_export_are_read(tmp_path: Path) -> None:
    file = tmp_path / "rewards.jsonl"
    file.write_text(
        '{"group_id": "12", "sample": 3, "reward": 1, "prompt": "2+2="}\n'
        '{"group_id": "12", "sample": 4, "reward": -0.5}\n'
    )
    assert {("12", 3): 1.0, ("12", 4): -0.5} == rewards_of(file)


@pytest.mark.parametrize("line", ["12/3 1", '{"group_id": "12"}', "[1]", "1"])
def test_a_line_that_is_none_is_named(tmp_path: Path, line: str) -> None:
    file = tmp_path / "rewards.jsonl"
    file.write_text('{"group_id": "12", "sample": 3, "reward": 1}\n' + line + "\n")
    with pytest.raises(ConfigError, match=r"rewards\.jsonl, line 2"):
        rewards_of(file)


def test_no_reward_at_all_and_nan_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "rewards.jsonl"
    file.write_text("")
    with pytest.raises(ConfigError, match="no line"):
        rewards_of(file)
    file.write_text('{"group_id": "12", "sample": 3, "reward": NaN}')
    with pytest.raises(ConfigError, match="line 1: reward is nan"):
        rewards_of(file)
