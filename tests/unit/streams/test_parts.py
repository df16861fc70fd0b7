"""Splitting and joining large records, without a bus."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlstreams.schemas import decode, encode
from rlstreams.schemas.events import Prompt
from rlstreams.schemas.tensor import Buffer, Tensor
from rlstreams.streams.log.parts import (
    Assembler,
    Message,
    num_parts,
    part_headers,
    split,
)
from rlstreams.streams.log.record import Partition, RawRecord

P = Partition("t", 0)


def message(offset: int, value: bytes, headers: dict[str, bytes] | None = None) -> Message:
    return Message(P, offset, b"k", value, headers or {}, 0)


def parts(record_id: str, *values: bytes, at: list[int]) -> list[Message]:
    """A record's messages at the given offsets."""
    return [
        message(offset, value, dict(part_headers({"own": b"1"}, record_id, i, len(values))))
        for i, (offset, value) in enumerate(zip(at, values, strict=True))
    ]


def joined(assembler: Assembler, messages: list[Message]) -> list[RawRecord]:
    return [record for m in messages if (record := assembler.add(m)) is not None]


def prompt(num_tokens: int) -> Prompt:
    return Prompt(
        group_id="7",
        sample=0,
        group_size=1,
        purpose="train",
        token_ids=Tensor.of(np.arange(num_tokens, dtype=np.int32)),
        tokenizer_hash="",
        text="",
        answer="",
        metadata="{}",
        row=0,
        dataset_epoch=0,
        min_policy_version=0,
        seed=0,
    )


def address(buffer: Any) -> int:
    return int(np.frombuffer(buffer, np.uint8).__array_interface__["data"][0])


@given(st.lists(st.binary(max_size=40), max_size=8), st.integers(1, 30))
def test_parts_are_the_value_in_order(pieces: list[bytes], part_bytes: int):
    """However it is cut, nothing is added, lost or empty, and `num_parts` knows the count."""
    value = b"".join(pieces)
    views: list[Buffer] = [memoryview(piece) for piece in pieces]
    found = list(split(views, part_bytes))
    assert value == b"".join(found)
    assert num_parts(len(value), part_bytes) == len(found)
    assert {part_bytes} >= {len(part) for part in found[:-1]}
    assert all(type(part) is bytes and len(part) <= part_bytes for part in found)


def test_a_single_piece_that_fits_is_not_copied():
    value = b"x" * 100
    (part,) = split([value])
    assert part is value


def test_a_part_is_joined_only_when_it_is_asked_for():
    """A large value is never joined whole: the first part comes before the last piece is read."""
    parts_found = split([bytes(10), bytes(10)], 10)
    assert bytes(10) == next(parts_found)


def test_the_first_incomplete_offset_is_known():
    """It is that of the earliest part 0 that waits, and None when nothing does."""
    a, b = parts("a", b"1", b"2", at=[4, 6]), parts("b", b"3", b"4", at=[5, 7])
    assembler = Assembler()
    assert assembler.first_offset(P) is None
    joined(assembler, [a[0], b[0]])
    assert 4 == assembler.first_offset(P)
    joined(assembler, [a[1]])
    assert 5 == assembler.first_offset(P)
    assert assembler.first_offset(Partition("t", 1)) is None
    assembler.forget(P)
    assert ((), None) == (assembler.incomplete(), assembler.first_offset(P))


@pytest.mark.parametrize("missing", [1, 2])
def test_a_gap_tears_the_record(missing: int):
    """A missing part is found by the next one, or by the end; what came is given out, marked."""
    messages = parts("a", b"1", b"2", b"3", b"4", at=[0, 1, 2, 3])
    del messages[missing]
    (torn,) = joined(assembler := Assembler(), messages)
    assert b"1234"[:missing] == torn.value
    assert f"{missing}/4".encode() == torn.headers["rlstreams-part"]
    assert () == assembler.incomplete()


@pytest.mark.parametrize("part", [b"x", b"1/1", b"-1/2", b"\xff", b"0/0", b"", None])
def test_foreign_part_headers_leave_the_message_whole(part: Any):
    """Headers that are not ours decide nothing: the record's bytes are judged when decoded."""
    headers = {"rlstreams-part": part, "rlstreams-record": b"a"}
    (found,) = joined(Assembler(), [message(0, b"v", headers)])
    assert (b"v", headers) == (found.value, found.headers)


def test_a_tensor_of_a_one_part_record_is_a_view_of_the_message():
    """From the message's bytes to the array nothing is copied: same object, same addresses."""
    (value,) = split(encode(prompt(10_000)))
    (record,) = joined(Assembler(), [message(0, value)])
    assert record.value is value
    assert _is_view_of(record)


def test_a_tensor_of_a_record_in_parts_is_a_view_of_the_joined_buffer():
    """Parts are joined into one buffer, once; the array lies in it."""
    cut = list(split(encode(prompt(10_000)), 7_000))
    (record,) = joined(Assembler(), parts("a", *cut, at=list(range(len(cut)))))
    assert len(cut) == len(record.offsets) == 6
    assert _is_view_of(record)


def _is_view_of(record: RawRecord) -> bool:
    event = decode(record.value)
    assert isinstance(event, Prompt)
    array = event.token_ids.numpy()
    assert list(range(10_000)) == array.tolist()
    begin = address(record.value)
    at = int(array.__array_interface__["data"][0])
    return begin < at and at + array.nbytes <= begin + len(record.value)
