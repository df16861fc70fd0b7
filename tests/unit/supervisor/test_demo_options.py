"""`rlstreams demo` as a request to `up`: a new run each time, or the one that is there."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import pytest

from rlstreams.__main__ import parsed
from rlstreams.cli.demo import demo_options
from rlstreams.up.supervisor.fault_hook import UpOptions


def request(*words: str) -> UpOptions:
    return demo_options(Namespace(**parsed(["demo", *words]).params))


@pytest.mark.parametrize(
    ("words", "run_id", "steps", "command"),
    [
        ([], "demo-2", 60, "demo --run.id=demo-2"),
        (["--steps", "3"], "demo-2", 3, "demo --run.id=demo-2"),
        (["--resume"], "demo", 60, "demo --run.id=demo"),
        (["--resume", "--run.id=mine"], "mine", 60, "demo --run.id=mine"),
    ],
)
def test_which_run_is_meant(
    words: list[str],
    run_id: str,
    steps: int,
    command: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Beside a run called demo; the command that is told for later leaves the steps open."""
    (tmp_path / "runs/demo").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    found = request(*words)
    expected = (run_id, steps, command, "--resume" in words)
    is_resumed = found.is_resumed
    assert expected == (
        found.config.run.id, found.config.trainer.steps, found.command, is_resumed
    )  # fmt: skip
