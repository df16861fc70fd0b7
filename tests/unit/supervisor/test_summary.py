"""The commands that `up` suggests at its end."""

from __future__ import annotations

import pytest

from workers.supervisor.summary import without


@pytest.mark.parametrize(
    ("words", "kept"),
    [
        ("a.toml --run.id=demo", "a.toml"),
        ("a.toml --run.id demo --trainer.steps 5", "a.toml --trainer.steps 5"),
        ("'my file.toml' --run.dir=x", "'my file.toml'"),
        ("a.toml --run.identity=x", "a.toml --run.identity=x"),
    ],
)
def test_overrides_that_a_new_run_replaces_are_left_out(words: str, kept: str) -> None:
    """The suggested command names each field once, however the user typed it."""
    assert kept == without(words, "run.id", "run.dir")
