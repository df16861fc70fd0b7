"""A reward of one's own, as the example shows it."""

from __future__ import annotations

from pathlib import Path

from rlstreams import open_run
from tests.e2e.command import UP_S, Workspace


def test_a_reward_with_two_parts_has_them_in_each_steps_metrics(tmp_path: Path) -> None:
    """Both parts of the example's reward, and the rate of the warm-up."""
    workspace = Workspace(tmp_path)
    run = tmp_path / "runs/two_parts"
    own = ["rlstreams", "up", "infra/examples/two_parts.toml", f"--run.dir={run}"]
    quick = ["--prompts.evaluate_rows=16", "--trainer.groups_per_step=4", "--steps", "3"]
    try:
        done = workspace.run(*own, *quick, timeout_s=UP_S)
        assert 0 == done.returncode, done.stdout
        with open_run(run) as log:
            steps = list(log.steps())
    finally:
        workspace.close()
    assert [1, 2, 3] == [step.step for step in steps]
    # Five steps of warm-up: step n has n fifths of its rate.
    assert [4e-5, 8e-5, 12e-5] == [round(step.metrics["lr"], 7) for step in steps]
    for step in steps:
        parts = {name for name in step.metrics if name.endswith(("right", "worked"))}
        assert 2 == len(parts), step.metrics
