"""Our codec and fastavro agree byte for byte, and nothing foreign gets past `decode`."""

from __future__ import annotations

import io
import json

import pytest
from fastavro import schemaless_reader, schemaless_writer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlstreams.schemas import (
    ControlState,
    DecodeError,
    Trajectory,
    UnknownSchemaError,
    decode,
    encode,
    fingerprint,
    schema_text,
)
from rlstreams.schemas.avro import parsing_form
from rlstreams.schemas.projection import Projection
from rlstreams.schemas.varint import long_bytes
from tests.factories import int32s, one_of_each, prompt, scored, trajectory
from tests.plain_events import to_plain
from tests.unit.schemas.strategies import events

MARKER = b"\xc3\x01"
EXAMPLES = one_of_each()
any_event = settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))


def record(event) -> bytes:
    return b"".join(encode(event))


def by_fastavro(event) -> bytes:
    """The same record as an independent implementation writes it."""
    text = schema_text(type(event).__name__)
    body = io.BytesIO()
    schemaless_writer(body, parsing_form(text), to_plain(event))
    return MARKER + fingerprint(text) + body.getvalue()


@any_event
@given(events())
def test_any_event_is_written_as_fastavro_does_and_read_by_both(event):
    """The same bytes; we read them from every kind of buffer, an outsider gets every field."""
    wire = record(event)
    assert by_fastavro(event) == wire
    assert event == decode(wire)
    assert event == decode(bytearray(wire))
    assert event == decode(memoryview(wire))
    assert type(event) is type(decode(wire))
    text = schema_text(type(event).__name__)
    assert to_plain(event) == schemaless_reader(io.BytesIO(wire[10:]), parsing_form(text), None)


def test_negative_block_counts_are_read():
    """Avro lets a writer give a block as minus its count, then its size in bytes."""
    wire = record(EXAMPLES["ControlState"])
    one_item = wire.index(b"\x02" + b"\x18tokens_per_s")
    size = len(b"\x18tokens_per_s") + 8
    sized = wire[:one_item] + b"\x01" + bytes([size << 1]) + wire[one_item + 1 :]
    event = EXAMPLES["ControlState"]
    assert event == decode(sized)
    assert (event.limits, event.by) == Projection(ControlState, "limits", "by").read(sized)


@pytest.mark.parametrize("name", EXAMPLES)
def test_truncation_is_told(name):
    """A record cut at any byte is refused as a DecodeError; so is one with a byte to spare."""
    wire = record(EXAMPLES[name])
    assert EXAMPLES[name] == decode(wire)
    for cut in range(len(wire)):
        for kind in (bytes, bytearray, memoryview):
            with pytest.raises(DecodeError):
                decode(kind(wire[:cut]))
    with pytest.raises(DecodeError, match="bytes to spare"):
        decode(wire + b"\x00")
    assert EXAMPLES[name] == decode(wire)


@pytest.mark.parametrize("length", [-1, 1 << 40, (1 << 63) - 1, -(1 << 63)])
def test_impossible_lengths_are_refused_before_memory_is_asked_for(length):
    """A length or count beyond the record is an error, however large."""
    header = MARKER + fingerprint(schema_text("Trajectory"))
    with pytest.raises(DecodeError):
        decode(header + long_bytes(length) + b"x" * 50)
    wire = record(trajectory())
    count_at = wire.index(b"\x04\x0cprompt")
    with pytest.raises(DecodeError):
        decode(wire[:count_at] + long_bytes(length) + wire[count_at + 1 :])


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (b"", "record of 0 bytes"),
        (b"\xc3\x01\x00", "record of 3 bytes"),
        (b'{"prompt": "2 + 3"}', "not with the Avro single-object marker 'c301'"),
    ],
)
def test_foreign_bytes_are_named(value, message):
    with pytest.raises(DecodeError, match=message.replace("+", r"\+")):
        decode(value)


def test_unknown_fingerprint():
    """A framed record of nobody's schema names its fingerprint and says where it was sought."""
    with pytest.raises(UnknownSchemaError, match="0011223344556677 is unknown"):
        decode(MARKER + bytes.fromhex("0011223344556677") + b"body")


@given(st.integers(), st.integers(0, 20))
@settings(max_examples=60, deadline=None)
def test_longs_beyond_64_bits_are_refused(n, extra):
    """Encoding names the number; nothing is cut silently."""
    event = prompt(row=n << extra * 8)
    if -(1 << 63) <= event.row < 1 << 63:
        assert event.row == decode(record(event)).row
    else:
        with pytest.raises(ValueError, match=str(event.row)):
            encode(event)


@pytest.mark.parametrize("changes", [{"row": 1.5}, {"text": 7}, {"text": None}, {"token_ids": 3}])
def test_wrong_types_are_refused(changes):
    with pytest.raises((TypeError, AttributeError)):
        encode(prompt(**changes))


def without(text: str, field: str) -> str:
    """A schema as it was before `field` came."""
    schema = json.loads(text)
    schema["fields"] = [f for f in schema["fields"] if f["name"] != field]
    return json.dumps(schema)


def written_with(text: str, event) -> bytes:
    body = io.BytesIO()
    schemaless_writer(body, parsing_form(text), to_plain(event))
    return MARKER + fingerprint(text) + body.getvalue()


def test_older_schema_gets_the_default():
    older = without(schema_text("Trajectory"), "engine")
    event = trajectory()
    read = decode(written_with(older, event), {fingerprint(older): older})
    assert isinstance(read, Trajectory)
    assert ("", "rollout-0") == (read.engine, read.worker)
    assert event.segments == read.segments


def test_truncation_under_another_schema():
    older = without(schema_text("ScoredTrajectory"), "worker")
    wire = written_with(older, scored())
    for cut in range(10, len(wire)):
        with pytest.raises(DecodeError):
            decode(wire[:cut], {fingerprint(older): older})


def test_a_foreign_schema_whose_records_take_no_bytes_is_not_read_with():
    """Each type twice within the next one: some thousand bytes of schema, and no end of values."""

    def nested(depth):
        inner = nested(depth - 1) if depth else "null"
        return {
            "type": "record",
            "name": f"R{depth}" if depth < 40 else "Prompt",
            "fields": [
                {"name": "a", "type": inner},
                {"name": "b", "type": f"R{depth - 1}" if depth else "null"},
            ],
        }

    text = json.dumps(nested(40))
    with pytest.raises(DecodeError, match="takes no bytes"):
        decode(MARKER + fingerprint(text), {fingerprint(text): text})


def test_tensor_data_is_not_copied_when_encoding():
    """The buffers of a record contain the array's own memory."""
    tokens = int32s(1000)
    assert any(piece is tokens.data for piece in encode(prompt(token_ids=tokens)))
