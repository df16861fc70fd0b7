"""An audit's memory grows by some bytes a sample, and not by what the sample holds."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
from rlstreams.streams.audit.rows import Rows, Segments

from rlstreams.schemas.events import ClosedGroups
from rlstreams.streams.audit.fold import AuditFold
from rlstreams.streams.log.record import Position
from tests.factories import sample_ref, step_completed, trainer_started
from tests.unit.streams.audit_log import CONFIG

SIZE = 8
PER_STEP = 128
BYTES_A_SAMPLE = 150


def train(fold: AuditFold, samples: range) -> None:
    """Issue, roll out, score and train these samples, as a live audit sees it."""
    number = np.array(samples)
    version = samples.start // PER_STEP
    sample: dict[str, Any] = {
        "place": number,
        "group": number // SIZE,
        "sample": number % SIZE,
        "size": np.full(len(number), SIZE),
    }
    row, one = np.arange(len(number)), np.ones_like(number)
    used = Segments(row=row, index=one, version=version * one, load=0 * one)
    tokens = Segments(row=row, index=one, version=version * one, tokens=1000 * one)
    load = (b"rollout-0", b"l%d" % version, version, b"h%d" % version)
    fold.add(Rows(topic="prompts", **sample))
    fold.add(Rows(topic="trajectories", **sample, finished_ms=one, segments=used, loads=[load]))
    fold.add(Rows(topic="scored-trajectories", **sample, segments=tokens))
    refs = tuple(
        sample_ref(str(n // SIZE), n % SIZE, offset=n, oldest_policy_version=version)
        for n in samples
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
    assert fold.measure.staleness == {0: 80 * PER_STEP * 1000}
    assert (held[1] - held[0]) / (79 * PER_STEP) < BYTES_A_SAMPLE
