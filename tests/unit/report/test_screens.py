"""Screens of one recorded run are those that were looked at: see `tests/screens.py`."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from rlstreams.streams.audit import auditor
from tests import screens


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return screens.recorded(tmp_path_factory.mktemp("screens"))


@pytest.mark.parametrize("name", screens.SCREENS)
def test_a_screen_is_as_it_was(name: str, run: Path) -> None:
    """To change one on purpose: `python -m tests.screens`, and read what changed."""
    assert (screens.FOLDER / f"{name}.txt").read_text("utf-8") == screens.screen(name, run)


def test_an_audit_of_a_recording_waits_for_nothing(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A breach that might heal in a live run is one there."""
    clock = SimpleNamespace(monotonic=time.monotonic, sleep=lambda _: pytest.fail("it waits"))
    monkeypatch.setattr(auditor, "time", clock)
    assert "lost" in screens.screen("audit", run)


def test_no_screen_is_left_that_nobody_compares() -> None:
    assert {f"{name}.txt" for name in screens.SCREENS} == {f.name for f in screens.FOLDER.iterdir()}
