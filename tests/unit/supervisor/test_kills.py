"""Kills for show and by key."""

from __future__ import annotations

from rlstreams.up.supervisor.run import KillMenu, KillPlan
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


def test_k_and_a_digit_name_a_worker() -> None:
    """The first key asks, the second answers."""
    menu = KillMenu(["prompts-0", "rollout-0"])
    assert menu.press("2") == ("", "")
    assert "2 rollout-0" in menu.press("k")[0]
    assert menu.press("2") == ("", "rollout-0")
    assert menu.press("2") == ("", "")


def test_any_other_key_kills_nobody() -> None:
    """A number too high and a letter both close the menu."""
    menu = KillMenu(["prompts-0"])
    for key in ("2", "x"):
        menu.press("k")
        assert menu.press(key) == ("nothing is killed", "")
    assert menu.press("1") == ("", "")
