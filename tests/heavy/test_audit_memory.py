"""An audit's memory grows by some bytes a sample, and not by what the sample holds."""

from __future__ import annotations

import tracemalloc

from schemas.events import ClosedGroups
from streams.audit.fold import AuditFold
from streams.audit.rows import Rows
from streams.audit.table import place_of
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
