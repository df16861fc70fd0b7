"""Which records a worker may begin after its predecessors' deaths: the clock is the test's."""

from __future__ import annotations

from rlstreams.streams.log.record import Partition, Position, RawRecord
from rlstreams.workers.loop.probation import PATIENCE_S, Probation

P0, P1 = Partition("t", 0), Partition("t", 1)


def raw(partition: int, offset: int) -> RawRecord:
    return RawRecord(
        position=Position("t", partition, offset), offsets=(offset,), key=b"", value=b""
    )


def done(_raw: RawRecord) -> bool:
    return False


def unfinished(_raw: RawRecord) -> bool:
    return True


def test_rounds_double_until_a_window_is_past() -> None:
    """1, 2, 4 and so on, as many as there are to begin; then all is as usual."""
    probation = Probation(window=7)
    probation.suspect(P0, 1)
    sizes = []
    while probation.is_active:
        sizes.append(probation.allowed(done, 0.0))
        probation.clear(P0)
        probation.begun([raw(0, n) for n in range(sizes[-1])], 0.0)
    assert [1, 2, 4] == sizes


def test_suspects_go_first_and_alone() -> None:
    """The first record of each suspect partition, before anything else."""
    probation = Probation(window=100)
    probation.suspect(P1, 2)
    waiting = [raw(0, 0), raw(1, 5), raw(1, 6)]
    assert [raw(1, 5)] == list(probation.eligible(waiting))
    assert (1, 2, 0) == (probation.allowed(done, 0.0), probation.tries(P1), probation.tries(P0))
    probation.clear(P1)
    probation.begun([raw(1, 5)], 0.0)
    assert waiting == list(probation.eligible(waiting))


def test_a_record_that_takes_long_is_waited_for_no_longer_than_patience() -> None:
    """A worker that lives so long is not killed at once; slow samples do not hold up the rest."""
    probation = Probation(window=100)
    probation.suspect(P0, 1)
    probation.clear(P0)
    probation.begun([raw(0, 0)], 0.0)
    assert 0 == probation.allowed(unfinished, PATIENCE_S - 0.1)
    assert 2 == probation.allowed(unfinished, PATIENCE_S)


def test_a_suspect_partition_without_a_record_ends_the_probation() -> None:
    """There is nothing to try."""
    probation = Probation(window=100)
    probation.suspect(P0, 1)
    probation.give_up(P0)
    assert not probation.is_active
