"""The files of a report: matplotlib draws one of them."""

from __future__ import annotations

from pathlib import Path

from rlstreams.show.report.collect import write
from rlstreams.show.report.plot import save_curve
from tests.unit.report.drifted_run import DRIFTS, views_after
from tests.unit.report.sample_run import report_input


def test_the_files_are_written(tmp_path: Path) -> None:
    """A page and a PNG."""
    written = write(report_input(), tmp_path / "new")
    assert written.page.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert written.curve.read_bytes().startswith(b"\x89PNG")


def test_a_drift_moves_no_point_of_the_picture(tmp_path: Path) -> None:
    """Held-out accuracy is drawn at the step that made its version."""
    for drifts in (0, DRIFTS):
        save_curve(views_after(drifts), (), "run", tmp_path / f"{drifts}.png")
    assert (tmp_path / "0.png").read_bytes() == (tmp_path / f"{DRIFTS}.png").read_bytes()
