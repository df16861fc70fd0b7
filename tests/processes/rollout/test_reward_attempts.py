"""A reward that fails now and then, as a busy judge over HTTP does, costs no sample."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlstreams.workers.config.reward import RewardSection
from rlstreams.workers.rollout.make_verifier import make_verifier
from rlstreams.workers.rollout.reward import RewardError

# Raises as often as the completion says, then gives how often it was called for this answer.
GRADE = """
class Refused(Exception):
    final = True
calls = {}
def grade(prompt, completion, answer, metadata):
    calls[answer] = calls.get(answer, 0) + 1
    if completion == "refuse":
        raise Refused(f"call {calls[answer]}")
    if calls[answer] <= int(completion):
        raise ConnectionError(f"call {calls[answer]}")
    return calls[answer]
"""


def section(folder: Path, attempts: int) -> RewardSection:
    file = folder / "grade.py"
    file.write_text(GRADE)
    return RewardSection(verifier=f"{file}:grade", processes=1, attempts=attempts, timeout_s=60.0)


def test_what_raises_is_tried_again(tmp_path: Path) -> None:
    """As often as `reward.attempts` says, unless the exception says that it is final."""
    with make_verifier(section(tmp_path, 3)) as verifier:
        assert 3 == verifier.judge("", "2", "a", {}, "stop").reward
        with pytest.raises(RewardError, match=r"ConnectionError: call 3, the last of 3 attempts"):
            verifier.judge("", "9", "b", {}, "stop")
        with pytest.raises(RewardError, match=r"Refused: call 1$"):
            verifier.judge("", "refuse", "c", {}, "stop")


def test_one_attempt_is_one_call(tmp_path: Path) -> None:
    """For a reward that is not to be called twice."""
    with (
        make_verifier(section(tmp_path, 1)) as verifier,
        pytest.raises(RewardError, match=r"ConnectionError: call 1$"),
    ):
        verifier.judge("", "1", "a", {}, "stop")
