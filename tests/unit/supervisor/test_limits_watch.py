"""What hurts later is told now: a disk that fills, and records that retention is about to take."""

from __future__ import annotations

from rlstreams.streams.log.record import LogRange, Partition
from rlstreams.streams.log.topics import SCORED
from rlstreams.streams.views.redo_needs import NeedsView, Retention, retention_problems
from rlstreams.up.supervisor.limits_watch import LOW_BYTES, DiskTrend
from tests.factories import NOW_MS, sample_ref, step_completed

GB = 1_000_000_000
HOUR_MS = 3_600_000
P0 = Partition(SCORED.name, 0)


def test_the_time_until_the_disk_is_full() -> None:
    """At the rate of the last minutes; a rate needs some time to be known."""
    trend = DiskTrend()
    assert ["", "", ""] == [trend.look(at_s, 20 * GB - at_s * 10_000_000) for at_s in (0, 5, 25)]
    assert "19.50 GB are free on the broker's disk, full in 32 min at 10.0 MB/s" == trend.look(
        50, 20 * GB - 500_000_000
    )


def test_a_disk_that_does_not_fill() -> None:
    """Growth that takes more than an hour is no news, a disk that is nearly full is."""
    trend = DiskTrend()
    assert ["", ""] == [trend.look(at_s, 20 * GB - at_s * 1_000_000) for at_s in (0, 60)]
    assert "a full disk stops the broker" in DiskTrend().look(0, LOW_BYTES - 1)


def needs(*steps: int, checkpoint_every: int = 4) -> NeedsView:
    """Step n used offset 10 n; offset 42 waits (see the factories)."""
    view = NeedsView(checkpoint_every)
    for step in steps:
        used = sample_ref(group_id=str(step), sample=0, offset=10 * step)
        view.apply(step_completed(step, samples=(used,), finished_at_ms=NOW_MS))
    return view


def test_what_a_redo_needs_begins_after_the_checkpoint() -> None:
    """Between checkpoints it is the oldest record that a step since used, then what waits."""
    assert (10, "is needed to redo step 1") == _need(needs(1, 2, 3))
    assert (42, "waits for step 5") == _need(needs(1, 2, 3, 4))


def _need(view: NeedsView) -> tuple[int, str]:
    need = view.needs[P0]
    return need.offset, need.why


def test_nothing_is_needed_before_the_first_step() -> None:
    """And a step of an epoch that was taken over needs nothing."""
    assert {} == NeedsView(4).needs


def told(
    begin: int, age_ms: int, retention: Retention, num_bytes: int = 0, end: int = 100
) -> list[str]:
    kept = {P0: LogRange(begin=begin, end=end, num_bytes=num_bytes)}
    limits = {SCORED.name: retention}
    found = retention_problems(needs(1, 2).needs, kept, limits, NOW_MS + age_ms)
    return [problem.text for problem in found]


def test_records_that_are_gone() -> None:
    """Named with position, use and what is there."""
    assert [
        "scored-trajectories[0]@10, which is needed to redo step 1, is gone: "
        "the first record kept is 11"
    ] == told(11, 0, Retention())


def test_records_that_have_used_half_of_their_time() -> None:
    """Half of it: early enough to lengthen it."""
    limit = Retention(retention_ms=4 * HOUR_MS)
    assert [] == told(0, HOUR_MS, limit)
    assert [
        "scored-trajectories[0]@10, which is needed to redo step 1, is 2 h old, "
        "and retention.ms removes it after 4 h"
    ] == told(0, 2 * HOUR_MS, limit)


def test_records_that_have_half_of_the_bytes_above_them() -> None:
    """Size is retention's other clock."""
    limit = Retention(retention_bytes=100_000_000)
    assert [] == told(0, 0, limit, num_bytes=50_000_000)
    assert ["has about 90 MB above it, and retention.bytes removes it at 100 MB"] == [
        text.split(", ", 2)[2] for text in told(0, 0, limit, num_bytes=100_000_000)
    ]


def test_a_partition_that_holds_nothing_more_is_no_problem() -> None:
    """What was trained and dropped may go."""
    assert [] == told(10, 9 * HOUR_MS, Retention(retention_ms=HOUR_MS), end=10)
