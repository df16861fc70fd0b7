"""What is remembered of earlier events speeds writing up and changes no byte of what is written."""

from __future__ import annotations

import dataclasses
import struct

import pytest
from hypothesis import HealthCheck, given, settings

from rlstreams.schemas import encode
from rlstreams.schemas.avro import fingerprint, schema_text
from rlstreams.schemas.binary import MARKER
from rlstreams.schemas.encoder import compile_encoder
from rlstreams.schemas.outlines import Outlines
from rlstreams.schemas.runs import OtherOutlineError
from rlstreams.schemas.straight import outline_of
from rlstreams.schemas.straight_encoder import compile_straight_encoder
from tests.factories import one_of_each, policy_segment, trajectory
from tests.unit.schemas.strategies import events
from tests.unit.schemas.test_straight import ENOUGH, variants

EXAMPLES = one_of_each()
REFUSALS = (TypeError, ValueError, AttributeError)


def header_of(event) -> bytes:
    return MARKER + fingerprint(schema_text(type(event).__name__))


def by_fields(event) -> bytes:
    """As the encoder of all events writes it."""
    return b"".join(compile_encoder(type(event), header_of(event))(event))


def line_of(event):
    """The line of code for events outlined as this one."""
    outline = tuple(outline_of(type(event), event))
    return compile_straight_encoder(type(event), outline, header=header_of(event))


def outcome(write, event):
    """The record, or the kind of error that refuses the event."""
    try:
        return b"".join(write(event))
    except (TypeError, ValueError, struct.error) as err:
        return type(err)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(events())
def test_any_event_is_written_alike_by_a_line_of_its_outline(event):
    """Twice, for the second time finds what the first one remembered."""
    straight = line_of(event)
    for _ in range(2):
        assert by_fields(event) == b"".join(straight(event))


def test_a_mixture_of_outlines_and_values_is_written_as_it_stands():
    """Whatever earlier events held, in whatever order they came."""
    for seed in range(4):
        for event in variants(seed):
            assert by_fields(event) == b"".join(encode(event))


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_field_of_a_wrong_type_is_judged_as_by_the_encoder_of_all_events(name):
    """Also when a line for the outline is there: the same bytes, or the same error."""
    event = EXAMPLES[name]
    general = compile_encoder(type(event), header_of(event))
    for _ in range(ENOUGH):
        encode(event)
    for field in dataclasses.fields(event):
        for wrong in (None, 1.5, "text", 1 << 70, b"bytes", ()):
            broken = dataclasses.replace(event, **{field.name: wrong})
            try:
                expected = outcome(general, broken)
            except (AttributeError, KeyError):
                continue  # a line may not be kinder: the encoder of all events decides
            assert expected == outcome(encode, broken)
    assert by_fields(event) == b"".join(encode(event))


def test_another_outline_is_refused_by_the_line():
    """None where a value was, a value where None was, and other counts."""
    with_none, with_some = trajectory(routed_experts=None), EXAMPLES["Trajectory"]
    assert with_some.routed_experts is not None
    one, two = (trajectory(segments=(policy_segment(),) * count) for count in (1, 2))
    parts = trajectory(reward_parts={"a": 1.0}), trajectory(reward_parts={})
    for first, second in ((with_none, with_some), (one, two), parts):
        for known, other in ((first, second), (second, first)):
            with pytest.raises((OtherOutlineError, *REFUSALS)):
                line_of(known)(other)


def test_zero_and_minus_zero_are_written_apart_by_a_line():
    """They are equal, so no key of a table may hold them."""
    events_ = [trajectory(segments=(policy_segment(temperature=t),)) for t in (0.0, -0.0, 1.0)]
    straight = line_of(events_[0])
    for event in events_ * 2:
        assert by_fields(event) == b"".join(straight(event))


def test_events_of_an_outline_get_a_line():
    """After a few of them."""
    outlines = Outlines(type(trajectory()), lambda outline: outline)
    for _ in range(ENOUGH):
        outlines.learn(trajectory())
    assert (tuple(outline_of(type(trajectory()), trajectory())),) == outlines.lines
