"""The files of a report: matplotlib draws one of them."""

from __future__ import annotations

from pathlib import Path

from rlstreams.show.report.collect import write
from tests.unit.report.sample_run import report_input


def test_the_files_are_written(tmp_path: Path) -> None:
    """A page and a PNG."""
    written = write(report_input(), tmp_path / "new")
    assert written.page.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert written.curve.read_bytes().startswith(b"\x89PNG")
