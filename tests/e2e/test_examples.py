"""A reward of one's own and another learning rate, as the examples show them."""

from __future__ import annotations

from pathlib import Path

from rlstreams import open_run
from rlstreams.schemas.events import StepCompleted
from tests.e2e.command import UP_S, Workspace

EXAMPLES = "infra/examples"


def completed(run: Path) -> list[StepCompleted]:
    """The steps of a run that is over."""
    with open_run(run) as log:
        return list(log.steps())


def test_a_reward_with_two_parts_goes_on_with_another_learning_rate(tmp_path: Path) -> None:
    """Parts are in each step's metrics; the resumed run says what changed, and uses it."""
    workspace = Workspace(tmp_path)
    run = tmp_path / "runs/two_parts"
    own = ["rlstreams", "up", f"{EXAMPLES}/two_parts.toml"]
    quick = [f"--run.dir={run}", "--prompts.evaluate_rows=16", "--trainer.groups_per_step=4"]
    try:
        first = workspace.run(*own, *quick, "--steps", "3", timeout_s=UP_S)
        assert 0 == first.returncode, first.stdout
        words = [*own, f"{EXAMPLES}/slower.toml", *quick, "--resume", "--steps", "6"]
        second = workspace.run(*words, timeout_s=UP_S)
        assert 0 == second.returncode, second.stdout
        assert "trainer.optimizer.lr: 0.0002 -> 5e-05" in second.stdout
        steps = completed(run)
    finally:
        workspace.close()
    assert [1, 2, 3, 4, 5, 6] == [step.step for step in steps]
    # Five steps of warm-up: step n has n fifths of its rate.
    rates = [4e-5, 8e-5, 12e-5, 4e-5, 5e-5, 5e-5]
    assert rates == [round(step.metrics["lr"], 7) for step in steps]
    for step in steps:
        parts = {name for name in step.metrics if name.endswith(("right", "worked"))}
        assert 2 == len(parts), step.metrics
