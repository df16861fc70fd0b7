"""The closed set equals a plain set of numbers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlstreams.schemas.events import ClosedGroups
from rlstreams.workers.trainer.intake.closed import ClosedSet


@given(st.lists(st.integers(0, 40)))
def test_equals_the_plain_set(numbers):
    """Membership is that of a plain set, in any order of adding, through the event and back."""
    closed, plain = ClosedSet(), set()
    for number in numbers:
        closed.add(number)
        plain.add(number)
    expected = [number in plain for number in range(45)]
    assert expected == [number in closed for number in range(45)]
    assert expected == [number in ClosedSet(closed.event()) for number in range(45)]


def test_an_event_that_is_not_compact_is_read():
    """Numbers above that touch or lie below the watermark are folded into it."""
    closed = ClosedSet(ClosedGroups(watermark=2, above=(1, 2, 4)))
    assert ClosedGroups(watermark=3, above=(4,)) == closed.event()


def test_a_negative_number_is_refused():
    with pytest.raises(ValueError, match="got -1"):
        ClosedSet().add(-1)
