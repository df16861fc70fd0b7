"""The help of each command: examples that parse, the same words for the same thing, no overflow."""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlstreams.__main__ import main, parser_of_all, split_overrides
from rlstreams.cli.arguments import EXAMPLES

README = Path(__file__).parents[3] / "README.md"
COLUMNS = 80


def commands(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """The parsers that do something: actions of a command, not the command above them."""
    nested = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
    if not nested:
        yield parser
    for action in nested:
        for one in action.choices.values():
            yield from commands(one)


PARSER = parser_of_all()
ALL = list(commands(PARSER))
each = pytest.mark.parametrize("command", ALL, ids=lambda one: one.prog)


@each
def test_the_examples_are_commands_that_parse(command: argparse.ArgumentParser) -> None:
    """Each line of the help's end goes to the command whose help it is."""
    assert (command.epilog or "").startswith(EXAMPLES)
    examples = (command.epilog or "").split("\n\n")[0]  # behind them: what the roles are
    for line in examples.splitlines()[1:]:
        program, *rest = shlex.split(line.partition(" > ")[0])
        words, overrides = split_overrides(rest)
        args = PARSER.parse_args(words)
        assert "rlstreams" == program
        assert command.get_default("run") == args.run
        assert [] == overrides or hasattr(args, "config")


@each
def test_each_option_is_explained(
    command: argparse.ArgumentParser, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a value's name is in capitals or a list of choices; nothing is wider than a terminal."""
    monkeypatch.setenv("COLUMNS", str(COLUMNS))
    for action in command._actions:
        assert action.help, action.dest
        if action.nargs != 0 and not action.choices and action.help != argparse.SUPPRESS:
            assert action.metavar, action.dest
    too_wide = [line for line in command.format_help().splitlines() if len(line) > COLUMNS]
    assert [] == [line for line in too_wide if not line.startswith("usage: ")]


@each
def test_a_run_is_named_by_the_same_words(command: argparse.ArgumentParser) -> None:
    """What reads TOML files takes `./run.toml` where none is named, and says so."""
    for action in command._actions:
        if action.dest == "config" and not action.option_strings:
            assert "*" == action.nargs
            assert str(action.help).endswith("default: ./run.toml")


def test_the_readme_lists_every_command() -> None:
    """One line each, in the order of `rlstreams --help`."""
    (named,) = [a for a in PARSER._actions if isinstance(a, argparse._SubParsersAction)]
    table = README.read_text("utf-8").partition("\n## Commands\n")[2].partition("\n## ")[0]
    assert list(named.choices) == re.findall(r"^\| `([\w-]+)", table, re.MULTILINE)


@pytest.mark.parametrize(
    "words",
    [
        ["audit"],
        ["dead-letters", "show", "17/3"],
        ["inspect"],
        ["topics", "tail", "steps"],
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
