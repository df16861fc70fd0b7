"""Skimming gives what decoding gives, for the fields that were asked for."""

from __future__ import annotations

import io
from typing import Any

import pytest
from fastavro import schemaless_reader, schemaless_writer
from hypothesis import given, settings

from schemas import DecodeError, decode, encode
from schemas.avro import parsing_form, schema_text
from schemas.binary import HEADER_BYTES
from schemas.events import EVENTS, Prompt, ScoredTrajectory, StepCompleted, Trajectory
from schemas.shapes import fields_of, shape_of, to_plain
from schemas.skim import Skimmer
from tests.factories import one_of_each, prompt, trajectory
from tests.unit.schemas.strategies import values

SEGMENTS = ("segments.author", "segments.token_ids.shape", "segments.policy_version")
NESTED = ("trajectory.group_id", "trajectory.sample", *(f"trajectory.{s}" for s in SEGMENTS))


def value_of(event: Any) -> bytes:
    return b"".join(encode(event))


def plain_fields(cls: type) -> list[str]:
    """Its integers and texts."""
    return [name for name, kind in fields_of(cls) if shape_of(kind)[0] in ("long", "string")]


@pytest.mark.parametrize("cls", EVENTS, ids=lambda cls: cls.__name__)
def test_integers_and_texts_of_every_event_are_read(cls: type) -> None:
    """Whatever lies between them is stepped over."""
    event = one_of_each()[cls.__name__]
    names = plain_fields(cls)
    values = [getattr(event, name) for name in names]
    expected = tuple(v.encode() if isinstance(v, str) else v for v in values)
    assert Skimmer(cls, names)(value_of(event)) == expected


@given(event=values(Trajectory))
@settings(max_examples=40)
def test_segments_are_read_as_decoding_reads_them(event: Trajectory) -> None:
    """Any number of segments, optional tensors present or not."""
    expected = [
        (s.author.encode(), s.token_ids.shape[0] if s.token_ids.shape else 0, s.policy_version)
        for s in event.segments
    ]
    found = Skimmer(Trajectory, ("sample", *SEGMENTS, "worker"))(value_of(event))
    assert found == (event.sample, expected, event.worker.encode())


def test_a_record_within_gives_its_values_in_place() -> None:
    """A score is about its trajectory."""
    event = one_of_each()["ScoredTrajectory"]
    segments = [(b"prompt", 5, -1), (b"policy", 3, 2)]
    assert Skimmer(ScoredTrajectory, NESTED)(value_of(event)) == (b"7", 1, segments)


def test_a_record_of_an_older_schema_is_decoded_in_full() -> None:
    """Another fingerprint, the same values: what resolution gives, without defaults of its own."""
    event = prompt(group_id="12")
    older = schema_text("Prompt").replace('"name": "issued_at_ms"', '"name": "was_issued_at_ms"')
    body = io.BytesIO()
    plain = to_plain(event)
    plain["was_issued_at_ms"] = plain.pop("issued_at_ms")
    schemaless_writer(body, parsing_form(older), plain)
    foreign = b"\xc3\x01" + b"\x01" * 8 + body.getvalue()
    skim = Skimmer(Prompt, ("group_id", "issued_at_ms"))
    assert skim(foreign, {b"\x01" * 8: older}) == (b"12", 0)


def test_blocks_with_a_byte_size_are_read() -> None:
    """Other writers may give an array's block a negative count and its size (Avro 1.12)."""
    value = value_of(trajectory(reward_parts={}))
    body = value[HEADER_BYTES:]
    one = body.index(b"\x04\x0cprompt")  # two segments in one block
    end = body.index(b"\x08stop") + 5
    sized = body[:one] + b"\x03" + _varint(end - one - 1) + body[one + 1 :]
    expected = schemaless_reader(io.BytesIO(sized), parsing_form(schema_text("Trajectory")), None)
    found = Skimmer(Trajectory, ("segments.author", "worker"))(value[:HEADER_BYTES] + sized)
    authors = [(segment["author"].encode(),) for segment in expected["segments"]]
    assert found == (authors, expected["worker"].encode())


def _varint(n: int) -> bytes:
    z, out = n << 1, bytearray()
    while z > 127:
        out.append(z & 127 | 128)
        z >>= 7
    return bytes((*out, z))


@pytest.mark.parametrize("cut", [0, 5, 12, 40, -1])
def test_a_record_that_was_cut_is_refused(cut: int) -> None:
    """As decoding refuses it."""
    value = value_of(trajectory())[:cut]
    with pytest.raises(DecodeError):
        decode(value)
    with pytest.raises(DecodeError):
        Skimmer(Trajectory, ("sample", "worker"))(value)


def test_bytes_to_spare_are_refused() -> None:
    """Something else was written behind the record."""
    with pytest.raises(DecodeError, match="fields end"):
        Skimmer(Trajectory, ("sample",))(value_of(trajectory()) + b"\0")


def test_another_event_is_refused() -> None:
    """A prompt among trajectories."""
    with pytest.raises(DecodeError, match="Prompt"):
        Skimmer(Trajectory, ("sample",))(value_of(prompt()))


@pytest.mark.parametrize("path", ["nobody", "reward", "metrics", "segments.nobody"])
def test_a_path_that_cannot_be_skimmed_is_refused(path: str) -> None:
    """At once, not at the first record."""
    cls = StepCompleted if path == "metrics" else Trajectory
    with pytest.raises(TypeError):
        Skimmer(cls, (path,))
