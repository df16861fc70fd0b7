"""A run of which too large a share is set aside is stopped with its reasons; few stop nobody."""

from __future__ import annotations

from typing import Any

import pytest

from rlstreams.schemas.events import (
    AbsentSample,
    ClosedGroups,
    DeadLetter,
    GroupsDropped,
    StepCompleted,
)
from rlstreams.show.health.poison import NEWS_EVERY_MS, PoisonWatch
from rlstreams.streams.views.folds import Folds
from rlstreams.workers.config.operation import DeadLettersSection
from rlstreams.workers.config.run import PromptsSection, RunConfig
from rlstreams.workers.config.trainer import TrainerSection
from tests.factories import (
    dead_letter,
    dropped_group,
    groups_dropped,
    sample_ref,
    step_completed,
)

GROUP_SIZE = 4


class Watch(PoisonWatch):
    """With folds of its own, which are fed first."""

    def __init__(self, config: RunConfig, is_live: bool) -> None:
        self.folds = Folds(group_size=GROUP_SIZE)
        super().__init__(config, self.folds, is_live=is_live)

    def apply(self, event: Any) -> None:
        self.folds.apply(event)
        super().apply(event)


def watch(*, is_live: bool = True, **section: Any) -> Watch:
    """One group a step, so that the window is twelve samples unless a test says otherwise."""
    config = RunConfig(
        prompts=PromptsSection(group_size=GROUP_SIZE),
        trainer=TrainerSection(groups_per_step=1),
        dead_letters=DeadLettersSection(**section),
    )
    return Watch(config, is_live)


def letters(group: int, *samples: int, **changes: Any) -> list[DeadLetter]:
    return [dead_letter(group_id=str(group), sample=s, **changes) for s in samples]


def closed(group: int) -> ClosedGroups:
    return ClosedGroups(watermark=group + 1)


def trained(group: int, absent: tuple[int, ...] = ()) -> StepCompleted:
    living = [s for s in range(GROUP_SIZE) if s not in absent]
    return step_completed(
        group + 1,
        samples=tuple(sample_ref(str(group), s) for s in living),
        absent=tuple(AbsentSample(group_id=str(group), sample=s, reason="reward") for s in absent),
        closed=closed(group),
    )


def dropped(group: int, reason: str = "dead_samples") -> GroupsDropped:
    return groups_dropped(groups=(dropped_group(str(group), reason=reason),), closed=closed(group))


def feed(folded: Watch, *events: Any) -> Watch:
    for event in events:
        folded.apply(event)
    return folded


def test_each_reason_is_told_now_and_then() -> None:
    """At once with its sample, its detail and how to list them; then with the number since."""
    folded = feed(watch(), dead_letter(detail="judge.py:3: KeyError"))
    told = "sample 7/2 was set aside by rollout-0, reward: judge.py:3: KeyError (rlstreams dead-"
    assert folded.news.startswith(told)
    assert folded.news.endswith("--reason reward)")
    feed(folded, dead_letter(detail="again"))
    assert "again" not in folded.news
    late = dead_letter(detail="late", at_ms=dead_letter().at_ms + NEWS_EVERY_MS)
    feed(folded, late)
    assert folded.news.startswith("2 more for reason reward, the newest: ")
    feed(folded, dead_letter(reason="decode", group_id="", sample=-1))
    assert folded.news.startswith("a foreign record was set aside")


def test_more_than_the_share_is_a_problem_with_reasons_and_an_example() -> None:
    """Half of a full window is not too much; one sample more is, and the sentence says why."""
    folded = feed(watch(), trained(0), trained(1, absent=(0, 1)), *letters(2, 0, 1, 2, 3))
    assert "" == folded.problem
    feed(folded, *letters(3, 0, detail="judge.py:3: KeyError"))
    assert folded.problem == (
        "7 of the last 12 samples were dead-lettered (58 %, dead_letters.max_share is 0.5): "
        "reward 7; for example sample 3/0 was set aside by rollout-0, reward: judge.py:3: KeyError"
    )


def test_a_problem_passes_once_samples_are_trained_again() -> None:
    """The window holds the newest samples alone."""
    folded = feed(watch(), *(letter for group in range(4) for letter in letters(group, 0, 1, 2, 3)))
    assert folded.problem
    feed(folded, trained(4), trained(5))
    assert "" == folded.problem


def test_samples_that_are_lost_with_their_group_count() -> None:
    """One dead sample of four ends its group: nothing is ever trained, and the reason is named."""
    events = [[*letters(group, 1, reason="engine"), dropped(group)] for group in range(3)]
    folded = feed(watch(), *(event for both in events for event in both))
    assert "12 of the last 12 samples" in folded.problem
    assert "lost with their group 9, engine 3; for example sample 2/1" in folded.problem


def test_a_letter_that_is_read_after_its_group_closed_is_not_counted_twice() -> None:
    """Topics have no order between them."""
    folded = feed(watch(window_samples=4), dropped(0), *letters(0, 1, 1))
    assert "4 of the last 4 samples" in folded.problem
    assert "lost with their group 4" in folded.problem


def test_a_sample_counts_once() -> None:
    """Whoever writes its letter twice, and whether a step names it as well."""
    assert "" == feed(watch(window_samples=2), *letters(0, 1, 1)).problem
    both = feed(watch(window_samples=6), *letters(0, 0, 1), trained(0, absent=(0, 1)))
    assert "" == both.problem


def test_groups_that_are_dropped_for_staleness_are_no_poison() -> None:
    """They ended, but nothing was wrong with them."""
    assert "" == feed(watch(max_share=0.1), *(dropped(n, "stale") for n in range(4))).problem


@pytest.mark.parametrize(
    "changes", [{"group_id": ""}, {"group_id": "e3-1"}, {"purpose": "evaluate"}]
)
def test_foreign_records_and_evaluations_do_not_count(changes: dict[str, str]) -> None:
    """A stranger who writes into the topics cannot stop the run."""
    assert "" == feed(watch(), *(dead_letter(sample=n, **changes) for n in range(30))).problem


def test_a_share_of_one_never_stops() -> None:
    """It is the way to say: never."""
    events = [letter for group in range(9) for letter in letters(group, 0, 1, 2, 3)]
    assert "" == feed(watch(max_share=1.0), *events).problem


def test_what_was_before_a_resumption_is_not_held_against_it() -> None:
    """The verifier may be mended: the window of a resumed run is empty."""
    before = (
        [letter for group in range(4) for letter in letters(group, 0, 1, 2, 3)],
        [trained(group, absent=(0, 1, 2)) for group in range(4)],
        [dropped(group) for group in range(4)],
    )
    for events in before:
        folded = feed(watch(is_live=False), *events)
        assert ("", "") == (folded.problem, folded.news)
