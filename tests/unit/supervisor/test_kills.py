"""Kills for show."""

from __future__ import annotations

from rlstreams.up.supervisor.run import KillPlan
from rlstreams.workers.config.operation import Kill

ROLLOUT, LOGPROB = Kill(role="rollout", at=0.33), Kill(role="logprob", at=0.66)


def test_a_kill_is_due_at_its_share_of_the_steps_until_it_is_done() -> None:
    """In the order of their shares, each once."""
    plan = KillPlan([LOGPROB, ROLLOUT], step=0, step_target=60)
    assert plan.due(0, 0) is None
    assert plan.due(19, 60) is None
    assert plan.due(20, 60) == ROLLOUT
    assert plan.due(21, 60) == ROLLOUT
    plan.done(ROLLOUT)
    assert plan.due(21, 60) is None
    assert plan.due(60, 60) == LOGPROB


def test_a_resumed_run_does_not_kill_again() -> None:
    """Kills that lie before its first step are past."""
    plan = KillPlan([ROLLOUT, LOGPROB], step=30, step_target=60)
    assert plan.due(31, 60) is None
    assert plan.due(40, 60) == LOGPROB
