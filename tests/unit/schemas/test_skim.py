"""Skimming gives what decoding gives, for the fields that were asked for."""

from __future__ import annotations

import io
import json
import random
import time
from typing import Any

import pytest
from fastavro import schemaless_writer
from hypothesis import given, settings
from hypothesis import strategies as st

from rlstreams.schemas import DecodeError, decode, encode
from rlstreams.schemas.avro import parsing_form, schema_text
from rlstreams.schemas.binary import HEADER_BYTES
from rlstreams.schemas.events import EVENTS, Prompt, ScoredTrajectory, StepCompleted, Trajectory
from rlstreams.schemas.shapes import fields_of, shape_of, to_plain
from rlstreams.schemas.skim import Skim, Skimmer
from rlstreams.schemas.varint import long_bytes
from tests.factories import one_of_each, policy_segment, prompt, scored, trajectory
from tests.unit.schemas.strategies import values

SEGMENTS = ("segments.author", "segments.token_ids.shape", "segments.policy_version")
NESTED = ("trajectory.group_id", "trajectory.sample", *(f"trajectory.{s}" for s in SEGMENTS))


def value_of(event: Any) -> bytes:
    return b"".join(encode(event))


def plain_fields(cls: type) -> list[str]:
    """Its integers and texts."""
    return [name for name, kind in fields_of(cls) if shape_of(kind)[0] in ("long", "string")]


def segments_of(found: Skim, prefix: str = "") -> list[list[tuple[bytes, int, int]]]:
    """By record: author, tokens and version of each segment."""
    author, tokens, version = (f"{prefix}{path}" for path in SEGMENTS)
    items = zip(
        found.owners[f"{prefix}segments"].tolist(),
        found.texts[author].slices(),
        found.numbers[tokens].tolist(),
        found.numbers[version].tolist(),
        strict=True,
    )
    by_record: list[list[tuple[bytes, int, int]]] = [[] for _ in found.records]
    for owner, *item in items:
        by_record[owner].append(tuple(item))
    return by_record


def expected_segments(event: Trajectory) -> list[tuple[bytes, int, int]]:
    return [
        (s.author.encode(), s.token_ids.shape[0] if s.token_ids.shape else 0, s.policy_version)
        for s in event.segments
    ]


@pytest.mark.parametrize("cls", EVENTS, ids=lambda cls: cls.__name__)
def test_integers_and_texts_of_every_event_are_read(cls: type) -> None:
    """Whatever lies between them is stepped over."""
    event = one_of_each()[cls.__name__]
    names = plain_fields(cls)
    found = Skimmer(cls, names)([value_of(event)] * 2)
    assert not found.errors
    for name in names:
        value = getattr(event, name)
        if isinstance(value, str):
            assert found.texts[name].slices() == [value.encode()] * 2
        else:
            assert found.numbers[name].tolist() == [value] * 2


@given(events=st.lists(values(Trajectory), max_size=4))
@settings(max_examples=60)
def test_a_batch_is_read_as_decoding_reads_it(events: list[Trajectory]) -> None:
    """Any numbers of segments beside each other, optional tensors present or not."""
    found = Skimmer(Trajectory, ("sample", *SEGMENTS, "worker"))([value_of(e) for e in events])
    assert found.records == list(range(len(events)))
    assert found.numbers["sample"].tolist() == [event.sample for event in events]
    assert found.texts["worker"].slices() == [event.worker.encode() for event in events]
    assert segments_of(found) == [expected_segments(event) for event in events]


def test_a_record_within_gives_its_values_in_place() -> None:
    """A score is about its trajectory."""
    events = [scored(trajectory(group_id=group, sample=3)) for group in ("7", "123", "e4-5")]
    found = Skimmer(ScoredTrajectory, NESTED)([value_of(event) for event in events])
    assert found.texts["trajectory.group_id"].slices() == [b"7", b"123", b"e4-5"]
    assert found.numbers["trajectory.sample"].tolist() == [3, 3, 3]
    assert segments_of(found, "trajectory.") == [expected_segments(e.trajectory) for e in events]


def test_an_older_schema_beside_ours_is_resolved() -> None:
    """Another fingerprint, the same values: what resolution gives, without defaults of its own."""
    event = prompt(group_id="12")
    older = schema_text("Prompt").replace('"name": "issued_at_ms"', '"name": "was_issued_at_ms"')
    body = io.BytesIO()
    plain = to_plain(event)
    plain["was_issued_at_ms"] = plain.pop("issued_at_ms")
    schemaless_writer(body, parsing_form(older), plain)
    foreign = b"\xc3\x01" + b"\x01" * 8 + body.getvalue()
    ours = prompt(group_id="13", issued_at_ms=5)
    skim = Skimmer(Prompt, ("group_id", "issued_at_ms"))
    found = skim([value_of(ours), foreign, value_of(ours)], {b"\x01" * 8: older})
    assert not found.errors
    assert found.texts["group_id"].slices() == [b"13", b"12", b"13"]
    assert found.numbers["issued_at_ms"].tolist() == [5, 0, 5]


def test_blocks_with_a_byte_size_are_read() -> None:
    """Other writers may give an array's block a negative count and its size (Avro 1.12)."""
    event = trajectory(reward_parts={})
    value = value_of(event)
    body = value[HEADER_BYTES:]
    one = body.index(b"\x04\x0cprompt")  # two segments in one block
    end = body.index(b"\x08stop") + 5
    sized = body[:one] + b"\x03" + long_bytes(end - one - 1) + body[one + 1 :]
    found = Skimmer(Trajectory, (*SEGMENTS, "worker"))([value, value[:HEADER_BYTES] + sized])
    assert segments_of(found) == [expected_segments(event)] * 2
    assert found.texts["worker"].slices() == [event.worker.encode()] * 2


@pytest.mark.parametrize("cut", [0, 5, 12, 40, -1])
def test_a_record_that_was_cut_is_refused(cut: int) -> None:
    """As decoding refuses it; its neighbours are read."""
    whole = value_of(trajectory(sample=1))
    with pytest.raises(DecodeError):
        decode(whole[:cut])
    for batch in ([whole, whole[:cut]], [whole[:cut], whole]):
        found = Skimmer(Trajectory, ("sample", *SEGMENTS))(batch)
        assert found.records == [batch.index(whole)]
        assert [*found.errors] == [batch.index(whole[:cut])]
        assert found.numbers["sample"].tolist() == [1]
        assert segments_of(found) == [expected_segments(trajectory())]


def test_bytes_to_spare_are_refused() -> None:
    """Something else was written behind the record."""
    found = Skimmer(Trajectory, ("sample",))([value_of(trajectory()) + b"\0"])
    assert not found.records
    assert isinstance(found.errors[0], DecodeError)


def test_another_event_is_refused() -> None:
    """A prompt among trajectories."""
    found = Skimmer(Trajectory, ("sample",))([value_of(trajectory()), value_of(prompt())])
    assert found.records == [0]
    assert "a Prompt where a Trajectory belongs" in str(found.errors[1])


def test_no_records_give_empty_columns() -> None:
    """As a batch of which none can be read does."""
    skim = Skimmer(Trajectory, ("sample", *SEGMENTS))
    for found in (skim([]), skim([b"", b"\xc3\x01"])):
        assert not found.records
        assert found.numbers["sample"].tolist() == []
        assert found.texts["segments.author"].slices() == []


def test_an_array_of_too_many_items_is_refused() -> None:
    """A stranger's record must not keep an audit busy for long: each item is a round."""
    skim = Skimmer(Trajectory, ("sample",))
    crowd = {f"{n:x}": 0.0 for n in range((1 << 16) + 1)}
    found = skim([value_of(trajectory(reward_parts=crowd)), value_of(trajectory(sample=4))])
    assert "too many items" in str(found.errors[0])
    assert found.numbers["sample"].tolist() == [4]


def test_a_count_beyond_the_record_costs_no_time() -> None:
    """It is held against the bytes that are left, before its items are walked one after another."""
    value = value_of(trajectory(reward_parts={}))
    at = value.index(b"\x04\x0cprompt")  # two segments
    damaged = value[:at] + long_bytes(4000) + value[at + 1 :]
    start_s = time.process_time()
    found = Skimmer(Trajectory, ("sample",))([damaged, value])
    assert time.process_time() - start_s < 0.05
    assert found.records == [1]


def test_a_branch_is_one_byte() -> None:
    """As decoding has it, which refuses a longer encoding of the same number."""
    value = value_of(prompt(replaces=None, replacement=0, issued_at_ms=0, is_chat=False))
    assert value.endswith(b"\0\0\0\0")
    longer = value[:-4] + b"\x80" + value[-4:]
    with pytest.raises(DecodeError):
        decode(longer)
    assert not Skimmer(Prompt, ("sample",))([longer]).records


def test_the_last_field_of_an_item_may_be_wanted() -> None:
    """Records with fewer items wait behind it while others go on."""
    events = [
        trajectory(segments=(policy_segment(finish_reason="length"), policy_segment())),
        trajectory(segments=(policy_segment(finish_reason="abort"),)),
    ]
    found = Skimmer(Trajectory, ("segments.finish_reason",))([value_of(e) for e in events])
    expected = [s.finish_reason.encode() for event in events for s in event.segments]
    assert found.texts["segments.finish_reason"].slices() == expected


def test_what_another_schema_may_hold_and_ours_cannot_is_refused() -> None:
    """A date where we have a number: it is decoded, and cannot be written anew."""
    event = trajectory(row=3)
    dated = json.loads(schema_text("Trajectory"))
    row = next(one for one in dated["fields"] if one["name"] == "row")
    row["type"] = {"type": "int", "logicalType": "date"}
    body = value_of(event)[HEADER_BYTES:]
    found = Skimmer(Trajectory, ("sample",))(
        [b"\xc3\x01" + b"\x02" * 8 + body], {b"\x02" * 8: json.dumps(dated)}
    )
    assert isinstance(found.errors[0], DecodeError)


def test_damage_stays_with_its_record() -> None:
    """Whatever bytes change, the others are read, and what decoding reads is read the same."""
    rng = random.Random(7)
    good = trajectory(sample=5, segments=(policy_segment(3), policy_segment(200)))
    events = [value_of(good), value_of(trajectory(sample=6))]
    skim = Skimmer(Trajectory, ("sample", "finished_at_ms", *SEGMENTS))
    for _ in range(400):
        damaged = bytearray(events[0])
        for _ in range(rng.choice((1, 1, 2, 8))):
            at = rng.randrange(HEADER_BYTES, len(damaged))
            damaged[at] = rng.choice((0, 1, 127, 128, 255, rng.randrange(256)))
        found = skim([events[1], bytes(damaged), events[1]])
        assert {0, 2} <= set(found.records)
        segments = dict(zip(found.records, segments_of(found), strict=True))
        assert segments[0] == segments[2] == expected_segments(trajectory())
        try:
            event = decode(bytes(damaged))
        except DecodeError:
            continue
        assert isinstance(event, Trajectory)
        assert found.numbers["sample"].tolist() == [6, event.sample, 6]
        assert found.numbers["finished_at_ms"].tolist()[1] == event.finished_at_ms
        assert segments[1] == expected_segments(event)


@pytest.mark.parametrize("path", ["nobody", "reward", "metrics", "segments.nobody"])
def test_a_path_that_cannot_be_skimmed_is_refused(path: str) -> None:
    """At once, not at the first record."""
    cls = StepCompleted if path == "metrics" else Trajectory
    with pytest.raises(TypeError):
        Skimmer(cls, (path,))


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("0", 0),
        ("7", 7),
        ("120", 120),
        ("9" * 18, 10**18 - 1),
        ("9" * 19, -1),
        ("07", -1),
        ("", -1),
        ("1a", -1),
        ("-1", -1),
        ("e1-2", -1),
        ("\u0663", -1),
    ],
)
def test_texts_as_numbers(text: str, number: int) -> None:
    """Decimal without a sign or leading zeros; beside others of other lengths."""
    events = [prompt(group_id=group) for group in ("31", text, "4")]
    found = Skimmer(Prompt, ("group_id",))([value_of(event) for event in events])
    assert found.texts["group_id"].naturals(18).tolist() == [31, number, 4]


def test_texts_are_compared_whole() -> None:
    """Not by their beginning."""
    texts = ("train", "trai", "trains", "evaluate", "")
    values = [value_of(prompt(purpose=text)) for text in texts]
    found = Skimmer(Prompt, ("purpose",))(values).texts["purpose"]
    assert found.are(b"train").tolist() == [True, False, False, False, False]
    assert found.are(b"").tolist() == [False, False, False, False, True]
