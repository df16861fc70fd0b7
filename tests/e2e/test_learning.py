"""The demo learns, and it learns from its rewards. Minutes: `make test-long` runs it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.e2e.command import Workspace

pytestmark = pytest.mark.slow

_ACCURACY = re.compile(r"accuracy from (\d\.\d\d) \(version 0\) to (\d\.\d\d) \(version 60\)")


def accuracies(workspace: Workspace, *words: str) -> tuple[float, float]:
    """Held-out accuracy before and after a whole demo."""
    done = workspace.up(*words)
    workspace.close()
    assert 0 == done.returncode, done.stdout
    found = _ACCURACY.search(done.stdout)
    assert found is not None, done.stdout
    return float(found[1]), float(found[2])


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_it_learns_to_add(seed: int, tmp_path: Path) -> None:
    """From mostly wrong to mostly right, with processes killed on the way, whatever the seed."""
    before, after = accuracies(Workspace(tmp_path), f"--run.seed={seed}")
    assert before <= 0.50
    assert after >= 0.85


def test_it_does_not_learn_from_permuted_rewards(tmp_path: Path) -> None:
    """The control: with each batch's rewards dealt out at random accuracy does not rise."""
    before, after = accuracies(Workspace(tmp_path), "--trainer.control=permuted")
    assert after <= before + 0.05
