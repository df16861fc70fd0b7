"""The pace of a run, and who holds whom back: from a step's own figures alone."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rlstreams.streams.views.pace import CURES, bottleneck, pace, pace_line, shortage
from rlstreams.streams.views.run import StepPoint

FIGURES = {
    "tokens_real": 1200.0,
    "tokens_shared": 200.0,
    "tokens_computed": 1100.0,
    "response_tokens": 50.0,
}


def made(num: int, **metrics: float) -> list[StepPoint]:
    """Steps of two seconds, ten samples each."""
    return [
        StepPoint(
            step=n, epoch=1, policy_version=n, reward=0.5, loss=0.0, num_samples=10, num_groups=5,
            num_tokens=1000, num_masked=0, metrics={**FIGURES, "train_s": 1.5, **metrics},
            staleness={}, started_at_ms=2000 * n - 1500, finished_at_ms=2000 * n,
        )
        for n in range(1, num + 1)
    ]  # fmt: skip


def test_means_are_over_the_last_ten_steps() -> None:
    """From step to step; the first, which waits for servers that start, counts only alone."""
    late, *rest = made(4)
    first = replace(late, started_at_ms=-90_000, metrics={**late.metrics, "wait_samples_s": 91.0})
    assert (alone := pace([first])) is not None
    assert (alone.step_s, alone.wait_samples_s) == (92.0, 91.0)
    assert (few := pace([first, *rest])) is not None
    assert (few.num_steps, few.step_s, few.wait_samples_s) == (3, 2.0, 0.0)
    slow = made(5, mfu=0.1) + made(20, mfu=0.4)[5:]
    found = pace(slow)
    assert (found.num_steps, found.step_s, found.padding, found.mfu) == (
        10,
        2.0,
        pytest.approx(1.1),
        pytest.approx(0.4),
    )
    assert (found.trained_per_s, found.sampled_per_s) == (500.0, 250.0)
    assert pace([]) is None


def test_a_pause_between_two_trainers_is_nobodys_pace() -> None:
    """A run that was resumed ten minutes later showed a sixth of its tokens a second."""
    steps = [
        replace(p, epoch=2, finished_at_ms=p.finished_at_ms + 600_000) if p.step > 8 else p
        for p in made(12)
    ]
    found = pace(steps)
    assert found is not None
    assert (found.num_steps, found.step_s, found.trained_per_s) == (9, 2.0, 500.0)
    only = pace([steps[0], replace(steps[1], epoch=2)])
    assert only is not None
    assert (only.num_steps, only.step_s) == (1, 1.5)


def test_a_clock_that_was_set_back_makes_no_step_quick() -> None:
    """The span of ten steps was 1 ms, and the pace a million tokens a second."""
    steps = [
        replace(
            p,
            started_at_ms=p.started_at_ms - 3_600_000,
            finished_at_ms=p.finished_at_ms - 3_600_000,
        )
        if p.step > 6
        else p
        for p in made(12, wait_samples_s=0.5)
    ]
    found = pace(steps)
    assert found is not None
    assert (2.0, 500.0) == (found.step_s, found.trained_per_s)


@pytest.mark.parametrize(
    ("waits", "told"),
    [
        ({}, "nobody holds the trainer back: it works 1.50 s of 2.00 s a step"),
        ({"wait_samples_s": 0.4}, "the trainer waits 0.40 s for samples, of 2.00 s a step"),
        ({"wait_scores_s": 0.3, "wait_samples_s": 0.01}, "waits 0.30 s for scores, of"),
        ({"wait_samples_s": 0.4, "wait_scores_s": 0.3}, "0.40 s for samples and 0.30 s for scores"),
    ],
)
def test_who_holds_whom_back(waits: dict[str, float], told: str) -> None:
    """Waits of less than a twentieth of a step are nobody's fault."""
    steps = made(12, **waits)
    assert told in bottleneck(steps)
    line = pace_line(steps, ranks=2)
    assert line.startswith(
        "last 10 steps: 2.00 s a step, 250 tokens/s of trained answers, 250 with prompts on each"
    )
    assert line.endswith(bottleneck(steps).replace("of 2.00 s a step", "in each step"))
    assert 1 == line.count("2.00 s"), "how long a step takes is said once"
    assert ", 1.10 tokens computed for one needed; " in line
    assert "" == pace_line(steps[:1]) == bottleneck(steps[:1])


def test_whoever_is_waited_for_most_of_a_step_is_said_how_to_be_faster() -> None:
    """A quarter of a step is none of that; of two waits the longer one counts."""
    assert bottleneck(made(3, wait_samples_s=0.5)).endswith("of 2.00 s a step")
    slots = bottleneck(made(3, wait_samples_s=1.1, wait_scores_s=0.2))
    assert slots.endswith(CURES["samples"])
    assert bottleneck(made(3, wait_samples_s=0.2, wait_scores_s=1.1)).endswith(CURES["scores"])


def test_what_is_sampled_and_not_trained_is_told() -> None:
    """As a share of the groups that were closed; few are nobody's concern."""
    assert "dropped" not in pace_line(made(3))
    dropping = [replace(point, num_dropped=15) for point in made(3)]
    assert ", 75% of groups dropped; nobody" in pace_line(dropping)


def test_memory_that_runs_short_is_told() -> None:
    """By what is left, or by memory that was given back and asked for again."""
    assert shortage(made(3)) == shortage(made(3, gpu_free_gb=20.0)) == ""
    assert "0.5 GB left" in shortage(made(3, gpu_free_gb=0.5))
    assert "6 times in 3 steps" in shortage(made(3, gpu_free_gb=20.0, gpu_alloc_retries=2.0))
