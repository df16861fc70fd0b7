"""Verifiers that other packages judge for: the real ones."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest

from rlstreams.workers.config.data import GymSection
from rlstreams.workers.sandbox.reward import AnswerToJudge, RewardError
from tests.processes.rollout.test_verifiers import rewards, verifier
from tests.unit.problems.rows import problems


@pytest.mark.skipif(find_spec("math_verify") is None, reason="needs rlstreams[math]")
def test_math_verify_compares_mathematics() -> None:
    """Forms of one number and of one expression are the same."""
    cases = [(r"so $\frac{1}{2}$", "0.5"), (r"\boxed{(x+1)^2}", "x^2+2x+1"), ("7", "8")]
    assert [1.0, 1.0, 0.0] == rewards(verifier("math-verify"), cases)
    with pytest.raises(RewardError, match=r"child_verifiers\.py:\d+: .* '' is no mathematics"):
        rewards(verifier("math-verify"), [("7", "")])


@pytest.mark.skipif(find_spec("reasoning_gym") is None, reason="needs rlstreams[gym]")
@pytest.mark.parametrize("task", ["chain_sum", "countdown", "mini_sudoku"])
def test_a_gym_scores_its_own_rows(
    task: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a row says is right is right, also in answer tags; rows went through JSON meanwhile."""
    monkeypatch.setenv("RLSTREAMS_CACHE", str(tmp_path))
    rows = problems(train=f"gym:{task}", gym=GymSection(rows=3)).train
    with verifier("reasoning-gym") as one:
        for row in map(rows.row, range(3)):
            for said, right in ((row.answer, 1.0), (f"<answer>{row.answer}</answer>", 1.0)):
                metadata = json.loads(row.metadata)
                assert right == one.judge(AnswerToJudge("?", said, row.answer, metadata)).reward
            assert 1.0 > one.judge(AnswerToJudge("?", "no", row.answer, metadata)).reward
