"""Held-out accuracy by version: what counts, and what it costs to keep."""

from __future__ import annotations

from rlstreams.streams.views.feed import Views
from tests.factories import dead_letter, prompt, trajectory
from tests.unit.streams.test_views import answer


def test_accuracy_is_the_mean_reward_of_a_version() -> None:
    """Rows of the same version, each sample once: the first record counts."""
    view = Views()
    view.apply(answer(0, row=0, reward=1.0))
    view.apply(answer(0, row=1, reward=0.0))
    view.apply(answer(0, row=1, reward=1.0))
    point = view.evaluation.points[0]
    assert (point.policy_version, point.accuracy, point.num_samples) == (0, 0.5, 2)


def test_an_evaluation_that_still_comes_in_is_not_on_the_curve() -> None:
    """It joins once every issued row is answered or dead."""
    view = Views()
    for row in range(2):
        view.apply(prompt(group_id=f"e0-{row}", sample=0, purpose="evaluate"))
    view.apply(answer(0, row=0))
    assert view.evaluation.curve == ()
    view.apply(dead_letter(group_id="e0-1", sample=0, purpose="evaluate"))
    assert [point.num_samples for point in view.evaluation.curve] == [1]


def test_an_evaluation_that_a_later_one_followed_is_on_the_curve() -> None:
    """Rows abandoned for ever must not hide the point."""
    view = Views()
    view.apply(prompt(group_id="e0-1", sample=0, purpose="evaluate"))
    view.apply(answer(0, row=0))
    view.apply(answer(5, row=0))
    assert [point.policy_version for point in view.evaluation.curve] == [0]


def test_training_samples_are_no_evaluation() -> None:
    """Purpose decides."""
    view = Views()
    view.apply(trajectory())
    view.apply(answer(0, purpose="train"))
    view.apply(trajectory(group_id="broken", purpose="evaluate"))
    assert view.evaluation.points == ()


def test_dead_and_answered_samples_are_told_apart() -> None:
    """Wherever in the data set their rows lie."""
    view = Views()
    far = 10**12
    for row in (3, far):
        view.apply(prompt(group_id=f"e0-{row}", sample=0, purpose="evaluate"))
        view.apply(dead_letter(group_id=f"e0-{row}", sample=0, purpose="evaluate"))
    view.apply(answer(0, row=far))
    (point,) = view.evaluation.points
    assert (2, 1, 1) == (point.num_issued, point.num_samples, point.num_dead)
