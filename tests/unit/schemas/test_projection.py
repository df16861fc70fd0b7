"""A projection gives what decoding gives, for the fields that were asked for."""

from __future__ import annotations

import time
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlstreams.schemas import EVENTS, DecodeError, Prompt, Trajectory, encode, fingerprint
from rlstreams.schemas.projection import Projection
from tests.factories import one_of_each, policy_segment, prompt, prompt_segment, trajectory
from tests.newer_release import newer_text, newer_value
from tests.unit.schemas.strategies import paths_of, picked, values


def leaves_of(cls: type) -> list[str]:
    """The paths that lead no further."""
    paths = [path for path, _ in paths_of(cls)]
    return [path for path in paths if not any(p.startswith(f"{path}.") for p in paths)]


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data(), cls=st.sampled_from(EVENTS))
def test_any_fields_of_any_event(data: st.DataObject, cls: type[Any]) -> None:
    """In any order; of a record of our schema, and of one that has to be resolved."""
    event = data.draw(values(cls))
    chosen: list[str] = []
    for path, _ in data.draw(st.lists(st.sampled_from(list(paths_of(cls))), max_size=8)):
        if not any(f"{path}.".startswith(f"{p}.") or p.startswith(f"{path}.") for p in chosen):
            chosen.append(path)
    projection = Projection(cls, *chosen)
    expected = tuple(picked(event, path) for path in chosen)
    wire = b"".join(encode(event))
    for buffer in (wire, bytearray(wire), memoryview(wire)):
        assert projection.read(buffer) == expected
    text = newer_text(cls.__name__)
    assert projection.read(newer_value(event), {fingerprint(text): text}) == expected


def test_a_field_through_an_array() -> None:
    """A list with a value for each item; None where an optional record is absent."""
    event = trajectory(segments=(prompt_segment(5), policy_segment(3)))
    fields = ("segments.token_ids.shape", "segments.behavior_logprobs.shape", "group_id")
    read = Projection(Trajectory, *fields, "group_id").read(b"".join(encode(event)))
    assert read == ([(5,), (3,)], [None, (3,)], "7", "7")


@pytest.mark.parametrize("name", one_of_each())
def test_a_record_that_is_cut_is_refused(name: str) -> None:
    """Whatever the fields: the others are stepped through to the end."""
    event = one_of_each()[name]
    wire = b"".join(encode(event))
    for projection in (Projection(type(event)), Projection(type(event), *leaves_of(type(event)))):
        for cut in range(len(wire)):
            with pytest.raises(DecodeError):
                projection.read(wire[:cut])
        with pytest.raises(DecodeError, match="bytes to spare"):
            projection.read(wire + b"\x00")


def test_a_record_of_another_event_is_refused() -> None:
    with pytest.raises(DecodeError, match="a Prompt, not a Trajectory"):
        Projection(Trajectory, "group_id").read(b"".join(encode(prompt())))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (["colour"], "Trajectory has no field colour"),
        (["segments.colour"], "Segment has no field colour"),
        (["segments.token_ids.colour"], "Tensor has no field colour"),
        (["row.x"], "Trajectory.row is a long: it has no field x"),
        (["reward_parts.x"], "Trajectory.reward_parts is a map: it has no field x"),
        (["segments", "segments.author"], "segments.author: asked for whole and in part"),
        (["segments.author", "segments"], "segments: asked for whole and in part"),
    ],
)
def test_fields_that_cannot_be_read_are_named(fields: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Projection(Trajectory, *fields)


# A record of 169 bytes whose array claims more items than bytes are left; it once ended audits.
DAMAGED_PROMPT = bytes.fromhex(
    "c301a1d93795274f979e04353902100a747261696e0a696e74617758010000000600000068000000080000006800"
    "00000d0000006800000008000000680000000a0000006b0000008001373434313939313234306632313465613736"
    "38643233396465366436383665353838336166663836633064376637656137333137393361613031333636613061"
    "14322b342b392b342b363d043235047b7d9017000c000000daeda0ccc06800"
)


@pytest.mark.parametrize("fields", [(), ("group_id",), ("token_ids.shape", "text")])
def test_a_count_beyond_the_record(fields: tuple[str, ...]) -> None:
    """Refused at once, wherever it stands."""
    began = time.thread_time()
    with pytest.raises(DecodeError):
        Projection(Prompt, *fields).read(DAMAGED_PROMPT)
    assert time.thread_time() - began < 0.05
