"""A run that only sets samples aside is stopped, with the last reason; single ones stop nobody."""

from __future__ import annotations

from tests.factories import dead_letter, step_completed
from workers.supervisor.poison import PoisonWatch


def test_a_reason_is_told_once() -> None:
    """The first letter of each reason is news, with its sample and detail."""
    watch = PoisonWatch(step_samples=4)
    watch.apply(dead_letter(detail="judge.py:3: KeyError"))
    assert "sample 7/2 was set aside by rollout-0, reward: judge.py:3: KeyError" == watch.news
    watch.apply(dead_letter(detail="again"))
    assert "again" not in watch.news
    watch.apply(dead_letter(reason="decode", group_id="", sample=-1))
    assert watch.news.startswith("a foreign record was set aside")


def test_three_steps_worth_without_a_step_is_a_problem() -> None:
    """A step in between starts the count anew; held-out samples do not count."""
    watch = PoisonWatch(step_samples=4)
    for _ in range(11):
        watch.apply(dead_letter())
    watch.apply(dead_letter(purpose="evaluate"))
    watch.apply(step_completed())
    for _ in range(11):
        watch.apply(dead_letter())
    assert "" == watch.problem
    watch.apply(dead_letter(detail="judge.py:3: KeyError"))
    assert watch.problem.startswith("12 samples were set aside without a step between")
    assert watch.problem.endswith("judge.py:3: KeyError")
