"""Windows of the log-prob role: what waits, in its order, until a window of it is due."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlstreams.schemas.events import Trajectory
from rlstreams.streams.log.record import Partition, Position, RawRecord, Record
from rlstreams.streams.log.topics import TRAJECTORIES
from rlstreams.workers.logprob import windows
from rlstreams.workers.logprob.windows import FULL, Backlog
from tests.unit.roles.test_logprob import segment, trajectory

BUDGET = 10  # tokens of a forward pass
PROMPT = 2  # tokens of `trajectory`'s prompt


def waiting(offset: int, tokens: int, partition: int = 0, version: int = 0) -> Record[Trajectory]:
    """A trajectory of so many tokens."""
    event = trajectory(str(offset), segment(version, *[5] * (tokens - PROMPT)))
    raw = RawRecord(Position(TRAJECTORIES.name, partition, offset), (offset,), b"", b"")
    return Record(event=event, raw=raw)


@given(st.lists(st.integers(PROMPT + 1, 3 * BUDGET), max_size=12), st.sets(st.integers(0, 11)))
def test_windows_are_what_came_in_its_order(sizes: list[int], unannounced: set[int]) -> None:
    """Each as few as make a whole one; what waits for its version is passed by, and stays."""
    backlog = Backlog(BUDGET, 0.0)
    records = [waiting(n, size, version=n in unannounced) for n, size in enumerate(sizes)]
    for record in records:
        backlog.add(record)
    left = [record for n, record in enumerate(records) if n not in unannounced]
    assert [] == backlog.overdue(0)
    while left:
        assert left == [one.record for one in backlog.ready()]
        window = backlog.take(backlog.ready())
        assert window == left[: len(window)]
        left = left[len(window) :]
        whole = FULL * BUDGET
        tokens = [sizes[record.position.offset] for record in window]
        assert sum(tokens[:-1]) < whole
        assert sum(tokens) >= whole or not left
    late = [record for n, record in enumerate(records) if n in unannounced]
    assert len(backlog) == len(late)
    assert [] == backlog.overdue(1)
    assert late == [one.record for one in backlog.ready()]


def test_what_another_member_got_is_forgotten() -> None:
    """All of the partition, and nothing else."""
    backlog = Backlog(BUDGET, 0.0)
    records = [waiting(n, 5, partition=n % 2) for n in range(5)]
    for record in records:
        backlog.add(record)
    assert 2 == backlog.forget({Partition(TRAJECTORIES.name, 1)})
    assert records[::2] == backlog.take(backlog.ready())


@pytest.mark.parametrize(
    ("tokens", "under_way", "is_due"),
    [
        (0, 0, False),
        (BUDGET - 1, 0, False),  # until the wait is over
        (BUDGET, 0, True),
        (FULL * BUDGET - 1, 1, False),
        (FULL * BUDGET, 1, True),  # queued behind the other
        (FULL * BUDGET, 2, False),
    ],
)
def test_a_window_starts_when_it_fills_the_scorer(
    tokens: int, under_way: int, is_due: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is smaller waits its time first, and behind another one until it is whole."""
    now = [100.0]
    monkeypatch.setattr(windows.time, "monotonic", lambda: now[0])
    backlog = Backlog(BUDGET, 2.0)
    assert windows.POLL == backlog.room
    if tokens:
        backlog.add(waiting(0, tokens))
    assert is_due == backlog.is_due(under_way)
    now[0] += 2.0
    assert (is_due or (tokens > 0 and not under_way)) == backlog.is_due(under_way)


def test_what_a_window_leaves_waits_its_own_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the window on."""
    now = [100.0]
    monkeypatch.setattr(windows.time, "monotonic", lambda: now[0])
    backlog = Backlog(BUDGET, 2.0)
    for n in range(2):
        backlog.add(waiting(n, 5))
    now[0] += 1.5
    backlog.take(backlog.ready()[:1])
    now[0] += 1.5
    assert not backlog.is_due(0)
    now[0] += 0.5
    assert backlog.is_due(0)


def test_a_version_that_never_comes_is_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the first look at its record until the deadline; then that record is out."""
    now = [100.0]
    monkeypatch.setattr(windows.time, "monotonic", lambda: now[0])
    backlog = Backlog(BUDGET, 2.0)
    for n in range(2):
        backlog.add(waiting(n, 5, version=n))
    assert [] == backlog.overdue(0)
    now[0] += windows.ANNOUNCEMENT_DEADLINE_S - 1
    assert [] == backlog.overdue(0)
    now[0] += 1
    assert [1] == [one.record.position.offset for one in backlog.overdue(0)]
    assert [] == backlog.overdue(0)
    assert [0] == [one.record.position.offset for one in backlog.ready()]


def test_no_more_is_read_than_two_whole_windows() -> None:
    """The rest stays in the log, for whoever has room."""
    backlog, tokens = Backlog(BUDGET, 0.0), 2 * FULL * BUDGET
    backlog.add(waiting(0, tokens))
    assert backlog.room > 0
    backlog.add(waiting(1, PROMPT + 1))
    assert 0 == backlog.room
