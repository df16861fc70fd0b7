"""An audit's memory grows by some bytes a sample, and not by what the sample holds."""

from __future__ import annotations

import tracemalloc

from schemas.events import ClosedGroups
from streams.audit_fold import AuditFold
from streams.audit_rows import Rows
from streams.audit_table import Table, group_key, group_name, place_of, position_at
from streams.record import Position
from tests.factories import sample_ref, step_completed, trainer_started
from tests.unit.streams.audit_log import CONFIG

SIZE = 8
PER_STEP = 128
BYTES_A_SAMPLE = 150


def train(fold: AuditFold, samples: range) -> None:
    """Issue, roll out, score and train these samples, as a live audit sees it."""
    ids = [(str(n // SIZE).encode(), n % SIZE) for n in samples]
    places = [place_of(0, n) for n in samples]
    version = samples.start // PER_STEP
    load = (b"policy", version, b"h%d" % version, b"l%d" % version)
    segments = [(b"prompt", -1, b"", b""), load]
    fold.add(Rows("prompts", [(*i, SIZE, b"train") for i in ids], places))
    rows = [(*i, SIZE, list(segments), b"rollout-0", 1) for i in ids]
    fold.add(Rows("trajectories", rows, places))
    tokens = [(b"prompt", 5, -1), (b"policy", 1000, version)]
    fold.add(Rows("scored-trajectories", [(*i, SIZE, list(tokens)) for i in ids], places))
    refs = tuple(
        sample_ref(i[0].decode(), i[1], offset=n, oldest_policy_version=version)
        for i, n in zip(ids, samples, strict=True)
    )
    event = step_completed(
        version + 1,
        samples=refs,
        masked=(),
        absent=(),
        closed=ClosedGroups(watermark=samples.stop // SIZE),
    )
    fold.foresee(event)
    fold.apply(event, Position("steps", 0, version))
    fold.settle()


def test_memory_grows_by_a_few_bytes_a_sample() -> None:
    """Ten thousand more samples, all trained: what is kept of each fits into 150 bytes."""
    fold = AuditFold()
    fold.apply(trainer_started(config=CONFIG), Position("steps", 0, 0))
    tracemalloc.start()
    try:
        held = []
        for first in range(0, 80 * PER_STEP, PER_STEP):
            train(fold, range(first, first + PER_STEP))
            if first in (0, 79 * PER_STEP):
                held.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    assert fold.staleness == {0: 80 * PER_STEP * 1000}
    assert (held[1] - held[0]) / (79 * PER_STEP) < BYTES_A_SAMPLE


def test_a_group_that_turns_out_larger_keeps_what_is_known() -> None:
    """It moves to other slots, and its old ones are empty."""
    table = Table()
    number = table.group(7, 1, 2)
    slot = table.first[number] + 1
    table.flags[slot], table.scored_at[slot] = 5, 99
    assert table.group(7, 40, 2) == number
    moved = table.first[number] + 1
    assert (table.flags[moved], table.scored_at[moved], table.name(moved)) == (5, 99, "7/1")
    assert table.flags[slot] == 0


def test_ids_and_places_survive_as_integers() -> None:
    """Both ways, for training groups and evaluations; what cannot be is told apart."""
    for text in (b"0", b"7", b"123456789", b"e0-0", b"e12-345"):
        key = group_key(text)
        assert key is not None
        assert group_name(key).encode() == text
    assert [group_key(t) for t in (b"", b"x", b"01", b"-1", b"9" * 30, b"e1-x")] == [None] * 6
    assert position_at(place_of(11, 1 << 40)) == (11, 1 << 40)
    assert place_of(-1, 5) == place_of(0, -1) == place_of(0, 1 << 50) == -1
