"""Screens of one recorded run are those that were looked at: see `tests/screens.py`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import screens


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return screens.recorded(tmp_path_factory.mktemp("screens"))


@pytest.mark.parametrize("name", screens.SCREENS)
def test_a_screen_is_as_it_was(name: str, run: Path) -> None:
    """To change one on purpose: `python -m tests.screens`, and read what changed."""
    assert (screens.FOLDER / f"{name}.txt").read_text("utf-8") == screens.screen(name, run)


def test_no_screen_is_left_that_nobody_compares() -> None:
    assert {f"{name}.txt" for name in screens.SCREENS} == {f.name for f in screens.FOLDER.iterdir()}
