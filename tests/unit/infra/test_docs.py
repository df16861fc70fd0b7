"""The pages are true: fields that they name exist, families that they list are tested."""

from __future__ import annotations

import re
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

import pytest

from tests import families
from workers.config.run import RunConfig

DOCS = Path(__file__).parents[3] / "infra" / "docs"
SECTIONS = {field.name for field in fields(RunConfig)}


def is_field(name: str) -> bool:
    """Whether the configuration has it."""
    kind: Any = RunConfig
    for part in name.split("."):
        known = get_type_hints(kind) if is_dataclass(kind) else {}
        if part not in known:
            return False
        kind = known[part]
    return True


def test_fields_that_the_page_for_others_names_exist() -> None:
    """In the right-hand column; the left-hand one is not ours."""
    rows = [
        line.split("|")[2]
        for line in (DOCS / "from-other-trainers.md").read_text("utf-8").splitlines()
        if line.startswith("| ") and not line.startswith("| --")
    ]
    named = {
        name
        for row in rows
        for name in re.findall(r"`([a-z_]+(?:\.[a-z_0-9]+)+)", row)
        if name.partition(".")[0] in SECTIONS
    }
    assert len(named) > 30
    assert [] == [name for name in sorted(named) if not is_field(name)]


@pytest.mark.parametrize("name", ["models.md", "from-other-trainers.md"])
def test_fields_in_the_text_exist(name: str) -> None:
    """Wherever a section of ours stands before a dot, outside of tables."""
    text = "\n".join(
        line for line in (DOCS / name).read_text("utf-8").splitlines() if not line.startswith("|")
    )
    named = re.findall(r"`([a-z_]+(?:\.[a-z_0-9]+)+)(?: = [^`]*)?`", text)
    ours = [n for n in named if n.partition(".")[0] in SECTIONS]
    assert [] == [n for n in ours if not is_field(n)]


def test_the_families_that_are_listed_are_tested() -> None:
    """All of them, and no other."""
    text = (DOCS / "models.md").read_text("utf-8")
    listed = re.findall(r"`(\w+(?:ForCausalLM|LMHeadModel))`", text)
    assert sorted(listed) == sorted(families.ALL)
