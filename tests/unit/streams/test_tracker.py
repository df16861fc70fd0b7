"""The tracker and its done set, against a plain model of the log."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlstreams.streams.log.done_set import (
    MAX_CHARACTERS,
    MAX_SPAN,
    UNREADABLE,
    DoneSetError,
    covered,
    decode_done,
    encode_done,
    tries_of,
)
from rlstreams.streams.log.record import Committed, Position, RawRecord
from rlstreams.streams.log.tracker import PartitionTracker


def make_record(*offsets: int) -> RawRecord:
    return RawRecord(
        position=Position("prompts", 0, offsets[0]), offsets=offsets, key=b"", value=b""
    )


@given(
    low=st.integers(0, 10**12),
    gaps=st.sets(st.integers(0, 5000), max_size=400),
    tries=st.integers(0, 999_999),
)
def test_a_done_set_survives_its_text(low: int, gaps: set[int], tries: int) -> None:
    done = {low + gap for gap in gaps}
    text = encode_done(low, done, tries)
    assert decode_done(low, text) == done
    assert tries_of(text) == tries
    assert decode_done(low, text + "\0") == done


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_any_pattern_of_the_widest_span_fits(share: float) -> None:
    """A partition paused at MAX_SPAN can always commit."""
    draw = random.Random(1)
    done = [offset for offset in range(1, MAX_SPAN + 1) if draw.random() < share]
    assert len(encode_done(0, done)) <= MAX_CHARACTERS


def test_what_lies_too_far_above_is_left_out() -> None:
    """A jump over aborted records, say: what is named is right, and fits."""
    draw = random.Random(1)
    done = {offset for offset in range(1, 100_000) if draw.random() < 0.5}
    text = encode_done(0, done, 999_999)
    named = decode_done(0, text)
    assert len(text) <= MAX_CHARACTERS
    last = max(named)
    assert named == {offset for offset in done if offset <= last}
    assert last > MAX_SPAN


@pytest.mark.parametrize("text", ["x", "b", "b!", "b~", "B00000", UNREADABLE, "b" * 5000])
def test_foreign_metadata_is_refused(text: str) -> None:
    """Somebody else's metadata is named, not misread, and costs no memory."""
    with pytest.raises(DoneSetError, match="no done set"):
        decode_done(0, text)
    tracker = PartitionTracker(Committed(offset=7, metadata=text))
    assert "no done set" in tracker.problem
    assert (7, 0) == (tracker.after().offset, tracker.tries)
    assert not covered(Committed(offset=7, metadata=text), 7)


def test_parts_that_interleave_are_tracked_by_all_their_offsets() -> None:
    """A record inside another's parts can be done before it."""
    tracker = PartitionTracker(Committed(offset=0))
    inner, outer = make_record(1), make_record(0, 2)
    assert tracker.deliver(inner)
    tracker.advance(0)  # the outer record is not whole yet
    first = tracker.after([inner])
    tracker.commit([inner])
    assert (first.offset, decode_done(0, first.metadata)) == (0, {1})
    assert tracker.after() == first
    assert not tracker.deliver(inner)  # a rebalance gives it out once more
    assert tracker.deliver(outer)
    tracker.advance(3)
    assert tracker.after([outer]) == Committed(offset=3)
