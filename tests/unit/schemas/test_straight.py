"""What is remembered of earlier records speeds reading up and changes nothing of what is read."""

from __future__ import annotations

import dataclasses
import math
import random
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
from hypothesis import HealthCheck, given, settings

from rlstreams.schemas import DecodeError, StepCompleted, Tensor, Trajectory, decode, encode
from rlstreams.schemas.binary import HEADER_BYTES, _decode_any
from rlstreams.schemas.encoder import Runs
from rlstreams.schemas.outlines import Outlines
from rlstreams.schemas.runs import OtherOutlineError, Run
from rlstreams.schemas.straight import compile_straight, outline_of
from tests.factories import (
    one_of_each,
    policy_segment,
    sample_ref,
    step_completed,
    trajectory,
)
from tests.unit.schemas.strategies import events

EXAMPLES = one_of_each()
ENOUGH = 12  # records of one outline, after which it has a line of its own
NOW_MS = 1_795_000_000_000


def record(event) -> bytes:
    return b"".join(encode(event))


def outcome(read, value):
    """The event, or that it was refused and why."""
    try:
        return read(value)
    except DecodeError as err:
        return str(err)


def by_fields(value):
    """As the decoder of all records reads it, which remembers texts only."""
    return _decode_any(value, memoryview(value), {})


def teach(event) -> bytes:
    wire = record(event)
    for _ in range(ENOUGH):
        assert event == decode(wire)
    return wire


def variants(seed: int) -> list[Trajectory]:
    """Records of a few outlines whose repeated fields have many values, of several lengths."""
    rng = random.Random(seed)
    return [
        trajectory(
            worker=f"rollout-{rng.choice((0, 7, 11, 123))}",
            engine=rng.choice(("", "builtin 1", "x" * 70)),
            attempt=rng.choice((0, 1, -1, 70, 9000)),
            purpose=rng.choice(("train", "evaluate")),
            row=rng.choice((0, 63, 64, 8192, 1 << 40)),
            reward=rng.choice((0.0, -0.0, 1.0, 0.25)),
            reward_parts=rng.choice(({}, {"format": 0.5}, {"exact": 1.0, "length": -0.0})),
            segments=tuple(
                policy_segment(rng.randint(0, 99), author=rng.choice(("policy", "environment")))
                for _ in range(rng.randint(0, 3))
            ),
            started_at_ms=rng.choice((0, 7, 1 << 33, NOW_MS, NOW_MS + 8191, -5)),
            finished_at_ms=rng.choice((0, 1 << 41, NOW_MS, NOW_MS + 1)),
        )
        for _ in range(60)
    ]


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(events())
def test_any_event_is_read_alike_by_a_line_of_its_outline(event):
    """Twice, for the second time finds what the first one remembered."""
    wire = record(event)
    straight = compile_straight(type(event), tuple(outline_of(type(event), event)))
    for _ in range(2):
        assert (event, len(wire)) == straight(wire, memoryview(wire), HEADER_BYTES)


def test_a_mixture_of_outlines_and_values_is_read_as_it_stands():
    """Whatever earlier records held, in whatever order they came."""
    for seed in range(8):
        for event in variants(seed):
            read = decode(record(event))
            assert event == read
            assert math.copysign(1, event.reward) == math.copysign(1, read.reward)


def test_threads_share_what_is_remembered():
    """Each reads its own records right while the others write into the tables."""
    switch_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(4) as threads:
            right = threads.map(
                lambda seed: all(event == decode(record(event)) for event in variants(seed) * 3),
                range(8),
            )
            assert [True] * 8 == list(right)
    finally:
        sys.setswitchinterval(switch_s)


def test_damage_is_judged_as_by_the_decoder_of_all_records():
    """Cut or changed anywhere, after the outline has its line: the same event, or error."""
    for name, event in EXAMPLES.items():
        wire = teach(event)
        for cut in range(HEADER_BYTES, len(wire)):
            assert outcome(by_fields, wire[:cut]) == outcome(decode, wire[:cut])
        rng = random.Random(name)
        for _ in range(300):
            broken = bytearray(wire)
            for _ in range(rng.randint(1, 3)):
                at = rng.randrange(HEADER_BYTES, len(wire))
                broken[at] = rng.choice((0, 1, 2, 127, 128, 255, rng.randrange(256)))
            # As text: a double that became NaN equals nothing.
            expected, found = (outcome(read, bytes(broken)) for read in (by_fields, decode))
            assert repr(plain(expected)) == repr(plain(found))
        assert event == decode(wire)


def plain(event):
    """Views as bytes: they show no contents."""
    if dataclasses.is_dataclass(event):
        fields = dataclasses.fields(event)
        return type(event), [plain(getattr(event, field.name)) for field in fields]
    if isinstance(event, tuple):
        return [plain(item) for item in event]
    return bytes(event) if isinstance(event, memoryview) else event


def test_tables_stay_bounded():
    """Values that never repeat do not pile up, and neither do outlines."""
    run = Run(["string"])
    for number in range(20_000):
        text = str(number)
        assert (1 + len(text), text) == run.read(bytes([2 * len(text)]) + text.encode(), 0)
    assert len(run) <= 8192
    outlines = Outlines(Trajectory, partial(compile_straight, Trajectory))
    unlike = [trajectory(segments=(policy_segment(),) * number) for number in range(30)]
    for event in unlike * 100:
        outlines.learn(event)
    assert len(outlines.lines) <= 8
    runs = Runs((dict.fromkeys(range(20000), b"x"),))
    assert 20_000 == sum(len(runs[(number,)]) for number in range(20_000))
    assert len(runs) <= 8192


def test_an_array_of_many_items_gets_no_line():
    """Its line would take a tenth of a second to compile, and another count another line."""
    outlines = Outlines(StepCompleted, lambda outline: outline)
    few, many = (step_completed(samples=(sample_ref(),) * count) for count in (8, 128))
    for event in (many, few) * ENOUGH:
        outlines.learn(event)
    assert (tuple(outline_of(StepCompleted, few)),) == outlines.lines


def test_tables_do_not_keep_records_alive():
    """What is remembered are short copies of bytes."""
    run = Run(["string"])
    text = "x" * 1000
    assert (1002, text) == run.read(b"\xd0\x0f" + text.encode() + bytes(1 << 20), 0)
    assert not run
    run.read(b"\x06abc" + bytes(1 << 20), 0)
    assert [b"\x06abc"] == list(run)


def test_a_short_run_at_the_end_is_not_taken_for_a_longer_one():
    """The size that is tried may reach beyond the record; what is found tells its own."""
    run = Run(["string"])
    run.read(b"\x06abc", 0)
    run.sizes.one[6] = 9
    record_ = b"--\x06abc"
    assert (4, "abc") == run.get(record_[2 : 2 + run.sizes.one[6]])


def test_another_count_or_branch_is_noticed():
    """A run holds the bytes that its outline tells."""
    run = Run(["long", b"\x00\x02"])
    assert (3, 4) == run.read(b"\x08\x00\x02", 0)
    for other in (b"\x08\x02\x02", b"\x08\x00", b"\x06\x00\x00"):
        try:
            run.read(other, 0)
        except OtherOutlineError:
            continue
        raise AssertionError(f"{other!r} was read")


def test_zero_and_minus_zero_are_written_apart():
    """They are equal, so no key of a table may hold them."""
    for temperature in (0.0, -0.0, 0.0):
        event = trajectory(segments=(policy_segment(temperature=temperature),))
        (read,) = decode(record(event)).segments
        assert math.copysign(1, temperature) == math.copysign(1, read.temperature)


def test_arrays_read_by_a_line_are_views_of_the_record():
    """By address, once the outline has its line."""
    event = trajectory()
    wire = teach(event)
    begin = np.frombuffer(wire, np.uint8).ctypes.data
    tensors = [decode(wire).segments[-1].token_ids, decode(wire).segments[-1].behavior_logprobs]
    for tensor in tensors:
        assert isinstance(tensor, Tensor)
        array = tensor.numpy()
        assert begin < array.ctypes.data < begin + len(wire) - array.nbytes
