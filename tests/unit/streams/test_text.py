"""Ends of log files, and JSON without words that JSON does not know."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from rlstreams.streams.log.group_ids import group_of, sample_name
from rlstreams.streams.log.text import TAIL_BYTES, plain_json, tail
from tests import factories


def test_the_last_lines_in_order(tmp_path: Path) -> None:
    """Bytes that are no text do not matter."""
    path = tmp_path / "log"
    path.write_bytes(b"one\ntwo \xff\nthree\n")
    assert ["two \ufffd", "three"] == tail(path, 2)


def test_no_more_than_the_end_is_read(tmp_path: Path) -> None:
    """A hole of 16 GiB lies before the last line: only memory would be missing for it."""
    path = tmp_path / "log"
    with path.open("wb") as file:
        file.truncate(1 << 34)
        file.seek(1 << 34)
        file.write(b"\nthe end\n")
    found = tail(path, 2)
    assert "the end" == found[-1]
    assert len(found[0]) < TAIL_BYTES


def test_a_log_that_is_not_there_has_no_lines(tmp_path: Path) -> None:
    assert () == tail(tmp_path / "log", 2)


def strictly(text: str) -> object:
    """Parsed as RFC 8259 has it."""

    def refuse(word: str) -> None:
        raise ValueError(f"{word} is no JSON")

    return json.loads(text, parse_constant=refuse)


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_none_is_null(number: float) -> None:
    """Wherever it stands; all else stays."""
    value = {"a": [1.5, number, {"b": (number, "ü")}], "c": True, "d": None}
    assert {"a": [1.5, None, {"b": [None, "ü"]}], "c": True, "d": None} == strictly(
        plain_json(value)
    )


def test_what_json_has_no_word_for_is_spelled_by_the_caller() -> None:
    """`default` is asked, and sorting and indenting are as they are for `json.dumps`."""
    value = {"b": b"x", "a": 1}
    assert '{\n  "a": 1,\n  "b": "x"\n}' == plain_json(
        value, indent=2, sort_keys=True, default=bytes.decode
    )


def test_a_sample_s_group_is_read_from_its_name() -> None:
    """Ids of groups are whoever's wrote them: a slash in one is its own."""
    assert "7/2" == sample_name(factories.trajectory(group_id="7", sample=2))
    for group in ("7", "e3-1", "a/b"):
        assert group == group_of(sample_name(factories.prompt(group_id=group, sample=11)))
    assert "" == group_of("no-sample")
