"""The help of each command: examples that parse, the same words for the same thing, no overflow."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from rlstreams.__main__ import COMMANDS, PROGRAM, main, parsed
from rlstreams.cli.options import OVERRIDES, Argument, Command

README = Path(__file__).parents[3] / "README.md"
COLUMNS = 80
MOST_COMMANDS = 18  # what is one idea is one command, with actions


def commands() -> Iterator[tuple[str, Command]]:
    """Those that do something, by what is typed: actions of a group, not the group above them."""
    context = click.Context(PROGRAM)
    for name in COMMANDS:
        found = PROGRAM.get_command(context, name)
        actions = found.commands if isinstance(found, click.Group) else {"": found}
        for action, one in actions.items():
            assert isinstance(one, Command)
            yield f"{name} {action}".strip(), one


ALL = dict(commands())
each = pytest.mark.parametrize("name", ALL)


@each
def test_the_examples_are_commands_that_parse(name: str) -> None:
    """Each line of the help's end goes to the command whose help it is."""
    assert ALL[name].examples
    for line in ALL[name].examples:
        program, *rest = shlex.split(line.partition(" > ")[0])
        assert "rlstreams" == program
        assert ALL[name] is parsed(rest).command


@each
def test_each_option_is_explained(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Arguments as well; nothing is wider than a terminal, and the first line is one."""
    for param in ALL[name].params:
        about = param.about if isinstance(param, Argument) else getattr(param, "help", "")
        assert about or getattr(param, "hidden", False), param.name
    assert len((ALL[name].help or "").partition("\n")[0]) > 10
    assert 0 == main([*name.split(), "--help"])
    lines = capsys.readouterr().out.splitlines()
    examples = {f"  {line}" for line in ALL[name].examples}
    assert [] == [line for line in lines if len(line) > COLUMNS and line not in examples]


@each
def test_a_run_is_named_by_the_same_words(name: str) -> None:
    """What reads TOML files takes `./run.toml` where none is named, and says so."""
    taken = ALL[name].takes is not None and ALL[name].takes is not OVERRIDES
    found = [param for param in ALL[name].params if param.name == "config"]
    assert taken == bool(found)
    for param in found:
        assert -1 == param.nargs
        assert str(getattr(param, "about", "")).endswith("default: ./run.toml")


def test_there_are_few_commands() -> None:
    assert len(COMMANDS) <= MOST_COMMANDS


def test_the_readme_lists_every_command() -> None:
    """One line each, in the order of `rlstreams --help`."""
    table = README.read_text("utf-8").partition("\n## Commands\n")[2].partition("\n## ")[0]
    assert COMMANDS == re.findall(r"^\| `([\w-]+)", table, re.MULTILINE)


@pytest.mark.parametrize(
    "words",
    [
        ["audit"],
        ["dead-letters", "show", "17/3"],
        ["inspect"],
        ["broker", "tail", "steps"],
        ["config", "show"],
    ],
)
def test_where_no_run_is_named_the_project_is_meant(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """In a folder without one the message says how to make it, and the exit status is 78."""
    monkeypatch.chdir(tmp_path)
    assert 78 == main(words)
    assert f"there is no run.toml in {tmp_path}" in capsys.readouterr().err
