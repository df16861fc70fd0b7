"""The line of a process's log that says why it died."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlstreams.streams.process.cause import last_error


@pytest.mark.parametrize(
    ("log", "cause"),
    [
        ("a\nValueError: first\nb\nlib.OtherError: second\nits note\n", "lib.OtherError: second"),
        ("RuntimeError: \n\n   Some tensors share memory\n  more\n", "RuntimeError: Some tensors"),
        ("RuntimeError: \n", "RuntimeError: "),
        ("nothing of it\n", ""),
    ],
)
def test_the_last_error_is_found_with_its_text(tmp_path: Path, log: str, cause: str) -> None:
    (tmp_path / "log").write_text(log)
    found = last_error(tmp_path / "log")
    assert found.startswith(cause)
    assert bool(found) == bool(cause)
    assert "" == last_error(tmp_path / "log", start=len(log))
