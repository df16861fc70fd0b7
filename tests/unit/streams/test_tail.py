"""The last lines of a log."""

from __future__ import annotations

from pathlib import Path

from rlstreams.streams.log.text import TAIL_BYTES, tail


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
    """Its process wrote nothing."""
    assert () == tail(tmp_path / "log", 2)
