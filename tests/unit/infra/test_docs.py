"""The pages are true: fields that they name exist, families that they list are tested."""

from __future__ import annotations

import re
import shlex
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

import click
import pytest

from rlstreams.__main__ import COMMANDS, PROGRAM, parsed
from rlstreams.workers.config.run import RunConfig
from tests import families

DOCS = Path(__file__).parents[3] / "infra" / "docs"
PAGES = [DOCS.parents[1] / "README.md", *sorted(DOCS.glob("*.md"))]
FILES = {"run.toml", "reward.py"}  # of a project; they look like fields
NAMES = {
    f"{name} {action}"
    for name in COMMANDS
    for action in getattr(PROGRAM.get_command(click.Context(PROGRAM), name), "commands", ())
}
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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_fields_in_the_text_exist(page: Path) -> None:
    """Wherever a section of ours stands before a dot, outside of tables."""
    text = "\n".join(
        line for line in page.read_text("utf-8").splitlines() if not line.startswith("|")
    )
    named = re.findall(r"`([a-z_]+(?:\.[a-z_0-9]+)+)(?: = [^`]*)?`", text)
    ours = [n for n in named if n.partition(".")[0] in SECTIONS and n not in FILES]
    assert [] == [n for n in ours if not is_field(n)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_that_a_page_names_can_be_typed(page: Path) -> None:
    """In blocks that run, in those that do not, and in the middle of a sentence."""
    found = re.findall(r"(?:^|`)(rlstreams [a-z][^`\n#>]*)", page.read_text("utf-8"), re.MULTILINE)
    for command in found:
        words = shlex.split(command.replace("\\", ""))[1:]
        if words[1:] and " ".join(words) not in NAMES:
            parsed(words)  # raises with what is wrong
        else:  # the name of a command, not a line to type
            assert words[0] in COMMANDS


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_a_page_names_are_there(page: Path) -> None:
    """Of the repository, by their path from its root."""
    named = re.findall(
        r"`((?:tests|workers|streams|schemas|infra)/[A-Za-z0-9_./-]+)`", page.read_text("utf-8")
    )
    assert [] == [name for name in named if not (DOCS.parents[1] / name).exists()]


def test_the_families_that_are_listed_are_tested() -> None:
    """All of them, and no other."""
    text = (DOCS / "models.md").read_text("utf-8")
    listed = re.findall(r"`(\w+(?:ForCausalLM|LMHeadModel))`", text)
    assert sorted(listed) == sorted(families.ALL)


def test_the_index_of_decisions_lists_each_page_once() -> None:
    """With the number that its heading has; every link of the index is a page."""
    folder = DOCS.parent / "decisions"
    pages = sorted(path.name for path in folder.glob("0*.md"))
    index = (folder / "README.md").read_text("utf-8")
    rows = re.findall(r"^- \[(\d{4})\]\(([\w.-]+)\): ", index, re.MULTILINE)
    assert pages == sorted(name for _, name in rows)
    for number, name in rows:
        assert name.startswith(number)
        assert (folder / name).read_text("utf-8").startswith(f"# {number}")
    assert set(re.findall(r"\]\(([\w.-]+)\)", index)) == set(pages)
