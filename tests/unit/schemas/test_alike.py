"""Items of an array are read alike, whether one unpacking tells their fields or each by itself."""

from __future__ import annotations

import random
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from rlstreams.schemas import DecodeError, decode, encode
from rlstreams.schemas.alike import Alike, is_plain
from rlstreams.schemas.binary import _CORRUPT
from rlstreams.schemas.decoder import compile_decoder
from rlstreams.schemas.events import DroppedGroup, MaskedSegment, SampleRef, Segment, StepCompleted
from tests.factories import sample_ref, step_completed

BORDERS = (0, 1, 63, 64, 8191, 8192, 1 << 20, 1 << 27, 1 << 40, -1, -64, -65, -8193, -(1 << 50))
TEXTS = ("", "7", "1234", "x" * 63, "x" * 64, "\u00e9" * 9)


def record(refs) -> bytes:
    event = step_completed(samples=tuple(refs), masked=(), absent=())
    return b"".join(encode(event))


def by_fields(monkeypatch):
    """A reader that never takes several fields at once."""
    with monkeypatch.context() as patch:
        patch.setattr(Alike, "read", item_by_item)
        decoder = compile_decoder(StepCompleted)
    return lambda value: decoder(value, memoryview(value), 10)


def item_by_item(self, b, i, left, items):
    for _ in range(left):
        item, i = self._decode(b, memoryview(b), i)
        items.append(item)
    return i


def mixture(rng: random.Random, count: int, odd: float) -> list[SampleRef]:
    """Refs like each other but for the share `odd` of them, in one field each."""
    usual = {"offset": 70_000, "oldest_policy_version": 90, "num_tokens": 700}
    refs = []
    for number in range(count):
        ref = {**usual, "group_id": str(1000 + number // 8), "sample": number % 8}
        ref["offset"] += number
        if rng.random() < odd:
            name = rng.choice(("group_id", *usual, "sample", "partition"))
            ref[name] = rng.choice(TEXTS if name == "group_id" else BORDERS)
        refs.append(sample_ref(**ref, reward=rng.choice((0.0, 1.0, -2.5)), advantage=rng.random()))
    return refs


@pytest.mark.parametrize("odd", [0.0, 0.02, 0.1, 0.5, 1.0])
def test_items_of_all_sizes_are_read_as_they_stand(odd):
    """Whatever sizes their neighbours have, or those of earlier records had."""
    rng = random.Random(odd)
    for _ in range(20):
        refs = mixture(rng, rng.choice((1, 7, 8, 9, 130)), odd)
        assert decode(record(refs)).samples == tuple(refs)


def test_every_size_of_every_field_gets_its_line():
    """Twice sixteen of a kind: the first ones teach."""
    for name in ("sample", "offset", "num_tokens"):
        for value in BORDERS:
            refs = [sample_ref(**{name: value}) for _ in range(16)]
            assert [refs, refs] == [list(decode(record(refs)).samples) for _ in range(2)]
    for text in TEXTS:
        refs = [sample_ref(text) for _ in range(16)]
        assert [refs, refs] == [list(decode(record(refs)).samples) for _ in range(2)]


def test_damage_is_judged_as_field_by_field(monkeypatch):
    """Cut or changed anywhere: the same event, or an error from both."""
    careful = by_fields(monkeypatch)
    wire = record(mixture(random.Random(1), 40, 0.02))
    decode(wire)
    rng = random.Random(2)
    damaged = [wire[:cut] for cut in range(10, len(wire))]
    for _ in range(3000):
        broken = bytearray(wire)
        for _ in range(rng.randint(1, 2)):
            broken[rng.randrange(10, len(wire))] = rng.choice((0, 2, 127, 128, rng.randrange(256)))
        damaged.append(bytes(broken))
    for value in damaged:
        try:
            expected, end = careful(value)
            says = repr(expected) if end == len(value) else "an error"  # NaN equals nothing
        except _CORRUPT:
            says = "an error"
        try:
            found = repr(decode(value))
        except DecodeError:
            found = "an error"
        assert says == found


def test_only_records_without_branches_are_read_so():
    """Texts, integers and doubles; a boolean has a domain of its own, an array no size."""
    assert is_plain(SampleRef)
    assert is_plain(MaskedSegment)
    assert not is_plain(DroppedGroup)
    assert not is_plain(Segment)


def test_lines_stay_bounded_and_the_rest_is_read_all_the_same():
    """Sizes that never repeat compile no code for ever."""
    alike = Alike(SampleRef, compile_decoder(SampleRef))
    for letters in range(60):
        for tokens in (3, 300, 30_000):
            refs = [sample_ref("x" * letters, num_tokens=tokens)] * 12
            wire = record(refs)
            start = wire.index(bytes([2 * letters]) + b"x" * letters + b"\x02\x00", 10)
            items: list[SampleRef] = []
            end = alike.read(wire, start, len(refs), items)
            assert items == refs
            assert (end - start) % len(refs) == 0
    assert len(alike._lines) == 64


@pytest.mark.parametrize("tokens", [(9_000, 700), (1 << 40, 700), (-9_000,)])
def test_a_mixture_is_learned_once(tokens):
    """Items that do not fit are read by themselves; in the next array there is none."""
    decode_one, num_decoded = compile_decoder(SampleRef), 0

    def counted(*arguments):
        nonlocal num_decoded
        num_decoded += 1
        return decode_one(*arguments)

    alike = Alike(SampleRef, counted)
    rng = random.Random(1)
    refs = [replace(ref, num_tokens=rng.choice(tokens)) for ref in mixture(rng, 64, 0.0)]
    wire = record(refs)
    for num_allowed in (9, 0):
        num_decoded, items = 0, []
        alike.read(wire, wire.index(b"\x081000"), len(refs), items)
        assert items == refs
        assert num_decoded <= num_allowed


def test_threads_share_what_was_learned():
    """Each reads its own records right while the others change the line."""
    switch_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(4) as threads:
            rngs = [random.Random(seed) for seed in range(8)]
            assert all(threads.map(reads_right, rngs))
    finally:
        sys.setswitchinterval(switch_s)


def reads_right(rng: random.Random) -> bool:
    steps = [mixture(rng, 40, 0.1) for _ in range(20)]
    return all(decode(record(refs)).samples == tuple(refs) for refs in steps)
