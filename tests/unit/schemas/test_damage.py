"""Records changed at random: an event or a DecodeError, at once, and without asking for memory."""

from __future__ import annotations

import gc
import random
import resource
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from rlstreams.schemas import DecodeError, Event, decode, encode, fingerprint
from rlstreams.schemas.projection import Projection
from rlstreams.schemas.varint import long_bytes
from tests.factories import int32s, one_of_each, prompt, sample_ref, step_completed
from tests.newer_release import newer_text, newer_value
from tests.unit.schemas.strategies import paths_of, picked

LIMIT_S = 0.05
LIMIT_BYTES = 100 << 20
HEADER_BYTES = 10
BYTES = (0, 1, 2, 127, 128, 254, 255)
NUMBERS = (-(1 << 63), -(1 << 40), -65, -1, 0, 1, 64, 1 << 20, 1 << 40, (1 << 62) - 1)

EVENTS: list[Event] = [
    *one_of_each().values(),
    prompt(token_ids=int32s(1000)),
    step_completed(samples=tuple(sample_ref(sample=n) for n in range(64))),
]
NEWER = {fingerprint(text): text for text in (newer_text(name) for name in one_of_each())}


def mutated(value: bytes, rng: random.Random) -> bytes:
    """Bytes set, put in, taken out, doubled or cut off; or a number where another one may stand."""
    damaged = bytearray(value)
    for _ in range(rng.choice((1, 1, 2, 4))):
        first = HEADER_BYTES if rng.random() < 0.99 else 0
        at = rng.randrange(min(first, len(damaged)), len(damaged) + 1)
        to = min(at + rng.choice((1, 1, 2, 8, 100)), len(damaged))
        kind = rng.randrange(6)
        if kind < 2:
            damaged[at : at + 1] = bytes([rng.choice((*BYTES, rng.randrange(256)))])
        elif kind == 2:
            damaged[at : at + rng.randrange(2)] = long_bytes(rng.choice(NUMBERS))
        elif kind == 3:
            del damaged[at:to]
        elif kind == 4:
            damaged[at:at] = damaged[at:to]
        else:
            del damaged[max(at, 1) :]
    return bytes(damaged)


@contextmanager
def memory_limit() -> Iterator[None]:
    """More than LIMIT_BYTES on top of what the process has is a MemoryError."""
    if sys.platform != "linux":
        yield
        return
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    limit = pages * resource.getpagesize() + LIMIT_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def outcome(read: Callable[..., Any], value: bytes) -> Any:
    """What is read, or None; within the limit, or at the second try: others use the processor."""
    for is_last in (False, True):
        began = time.thread_time()
        found = None
        with suppress(DecodeError):
            found = read(value, NEWER)
        took_s = time.thread_time() - began
        if took_s < LIMIT_S:
            return found
        assert not is_last, f"{took_s:.3f} s for {value.hex()}"
    return None


@pytest.mark.parametrize("num_records", [5_000, pytest.param(1_000_000, marks=pytest.mark.slow)])
def test_damage_is_an_error_and_nothing_worse(num_records: int) -> None:
    """From decoding and from projections; what can be decoded is what a projection gives."""
    rng = random.Random(num_records)
    paths = {
        type(event): [  # no doubles: those that are not numbers do not equal themselves
            path
            for path, shape in paths_of(type(event))
            if shape in ("long", "string", "boolean", "bytes")
        ]
        for event in EVENTS
    }
    projections = [
        (chosen, Projection(cls, *chosen))
        for cls, every in paths.items()
        for chosen in ([], every, rng.sample(every, min(4, len(every))))
    ]
    by_event = {cls: [pair for pair in projections if pair[1].event is cls] for cls in paths}
    cases = [
        (wire, by_event[type(event)])
        for event in EVENTS
        for wire in (b"".join(encode(event)), newer_value(event))
    ]
    for wire, of_event in cases:  # compiled
        assert [decode(wire, NEWER), *(p.read(wire, NEWER) for _, p in of_event)]
    gc.collect()
    num_read = 0
    with memory_limit():
        for _ in range(num_records):
            wire, of_event = rng.choice(cases)
            value = mutated(wire, rng)
            event = outcome(decode, value)
            chosen, projection = rng.choice(of_event)
            found = outcome(projection.read, value)
            if event is not None and type(event) is projection.event:
                num_read += 1
                assert found == tuple(picked(event, path) for path in chosen), value.hex()
    assert 0 < num_read < num_records
