"""Whatever others write: each decoder of foreign bytes ends at once, and no fold falls over it.

Events themselves are in `tests/unit/schemas/test_damage.py`, files of a recording in
`tests/unit/recording/test_damage.py`.
"""

from __future__ import annotations

import gc
import random
from contextlib import suppress

import pytest

from rlstreams.debug.letters.view import LettersView
from rlstreams.schemas import DecodeError, decode, encode
from rlstreams.show.metrics.rows import MetricRows
from rlstreams.streams.audit.classes import Classes
from rlstreams.streams.audit.fold import AuditFold
from rlstreams.streams.ledger import Ledger
from rlstreams.streams.log.done_set import (
    MAX_CHARACTERS,
    DoneSetError,
    decode_done,
    encode_done,
    tries_of,
)
from rlstreams.streams.log.parts import Assembler, part_headers
from rlstreams.streams.log.record import Partition
from rlstreams.streams.views.feed import Views
from tests.unit.schemas.test_damage import EVENTS, memory_limit, mutated, outcome
from tests.unit.streams.audit_log import feed, raw_record, reached
from tests.unit.streams.test_parts import message

MANY = pytest.param(1_000_000, marks=pytest.mark.slow)


@pytest.mark.parametrize("num_records", [500, MANY])
def test_commit_metadata_is_a_done_set_or_none(num_records: int) -> None:
    """As wide as a writer's at most, and read in time and memory that are bounded by that."""
    rng = random.Random(num_records)
    sets = [[1], range(2, 24_000, 2), range(9_000), [*range(50), 20_000]]
    texts = [encode_done(0, offsets, 2) for offsets in sets]

    def read(value: bytes, _: object) -> frozenset[int] | None:
        text = value.decode("latin-1")
        tries_of(text)
        with suppress(DoneSetError):
            return decode_done(7, text)
        return None

    gc.collect()
    num_read = 0
    with memory_limit():
        for _ in range(num_records):
            value = mutated(b"\0" * 10 + rng.choice(texts).encode(), rng)[10:]
            if (found := outcome(read, value)) is not None:
                num_read += 1
                assert all(7 <= offset <= 7 + 8 * MAX_CHARACTERS for offset in found)
                assert len(value) <= MAX_CHARACTERS + 1
    assert 0 < num_read < num_records


@pytest.mark.parametrize("num_records", [2_000, MANY])
def test_part_headers_hold_nobody_up(num_records: int) -> None:
    """A message is given out whole, waits for its next part, or shows a record that is torn."""
    rng, assembler, at = random.Random(num_records), Assembler(), Partition("t", 0)
    for offset in range(num_records):
        if offset % 100 == 0:
            assembler.forget(at)
        count = rng.randrange(1, 4)
        headers = dict(part_headers({}, str(rng.randrange(3)), rng.randrange(count), count))
        name = rng.choice([*headers, "rlstreams-id"])
        damaged = mutated(b"\0" * 10 + headers.get(name, b""), rng)[10:]
        headers[name] = rng.choice([damaged, damaged, b"9" * 5000])
        found = assembler.add(message(offset, b"v", headers))
        if found is not None and found.offsets == (offset,) and "rlstreams-part" in headers:
            assert found.value == b"v"
        assert len(assembler.incomplete()) <= 1 + offset % 100


@pytest.mark.parametrize("num_records", [2_000, MANY])
def test_folds_take_every_event_that_can_be_read(num_records: int) -> None:
    """Views, metrics, ledger and audit: what decodes may still say anything."""
    rng = random.Random(num_records)
    wires = [b"".join(encode(event)) for event in EVENTS]
    views, letters, ledger, metrics = Views(), LettersView(), Ledger(), MetricRows(has_agents=True)
    audit = AuditFold()
    for number in range(num_records):
        with suppress(DecodeError):
            event = decode(mutated(rng.choice(wires), rng))
            for fold in (views, letters, ledger, metrics):
                fold.apply(event)
            feed(audit, [raw_record(rng.choice(["steps", "prompts"]), number, event)])
    assert views.state is not None
    assert Classes(audit, reached(set(), set())).report().issued >= 0
