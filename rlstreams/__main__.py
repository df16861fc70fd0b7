"""The console script `rlstreams`: finds the command, hands it its arguments, explains its errors.

A command is a function of `rlstreams/cli` that is declared by `@command`: it takes the parsed
arguments and returns an exit status. One that has `args.config` also gets `args.overrides`: every
`--a.b VALUE` on the line, for `rlstreams.workers.config.load.load`.
"""

from __future__ import annotations

import argparse
import re
import signal
import sys
from collections.abc import Sequence
from functools import cache
from keyword import iskeyword
from pathlib import Path
from typing import NoReturn

from rlstreams.cli.arguments import Help, add_commands
from rlstreams.workers.loop.ending import (
    release_output,
    speak_any_text,
    status_of,
    unwound_by_signals,
)
from rlstreams.workers.loop.runtime import end_within

COMMANDS = (
    "demo",
    "init",
    "try",
    "up",
    "worker",
    "broker",
    "topics",
    "audit",
    "dead-letters",
    "control",
    "chaos",
    "inspect",
    "export",  # and export-model
    "metrics",
    "track",
    "monitor",
    "web",
    "report",
    "doctor",
    "record",
    "replay",
    "diff",
    "rerun-step",
    "engine",
    "config",
    "explain",
)
_OVERRIDE = re.compile(r"--[A-Za-z_]\w*\.[^=]+(=|$)")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status that the process should end with."""
    from rlstreams.streams.log.errors import StreamsError
    from rlstreams.workers.config.here import config_here
    from rlstreams.workers.loop.runtime import OwnerAliveError, exit_status, explain

    words, overrides = split_overrides(sys.argv[1:] if argv is None else argv)
    parser = parser_of_all()
    words = options_last(parser, words)
    args, unknown = parser.parse_known_args(words)
    if unknown:
        _refuse(parser, args, unknown[0])
    if overrides and not hasattr(args, "config"):
        parser.error(f"{args.command} reads no configuration, so {overrides[0]} has no meaning")
    args.overrides = overrides
    try:
        if getattr(args, "config", None) == [] and getattr(args, "wants_config", True):
            args.config = [config_here()]
        with unwound_by_signals():
            status = int(args.run(args))
            sys.stdout.flush()
    except (StreamsError, OwnerAliveError) as err:
        explain(err)
        status = exit_status(err)
    except KeyboardInterrupt:
        status = 128 + signal.SIGINT
    except (OSError, SystemExit) as err:
        status = status_of(err)
    return status


def split_overrides(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """The words for the command, and the dotted overrides among them with their values.

    None of our own options has a dot, so the two cannot be mixed up.
    """
    words: list[str] = []
    overrides: list[str] = []
    rest = iter(argv)
    for word in rest:
        match = _OVERRIDE.match(word)
        if match is None:
            words.append(word)
            continue
        overrides.append(word)
        if not match.group(1):
            overrides += [value for value in [next(rest, None)] if value is not None]
    return words, overrides


def options_last(parser: argparse.ArgumentParser, words: Sequence[str]) -> list[str]:
    """The words with all options after the arguments of their command, where argparse takes them.

    It stops to look for `RUN ...` at the first option behind one of them.
    """
    ahead: list[str] = []
    rest = list(words)
    while (nested := _nested(parser)) is not None and rest:
        ahead.append(rest.pop(0))
        parser = nested.choices.get(ahead[-1], parser)
        if ahead[-1] not in nested.choices:
            return list(words)  # an option of the program itself, or no command of ours
    takes = {name: action for action in parser._actions for name in action.option_strings}
    arguments: list[str] = []
    options: list[str] = []
    while rest and rest[0] != "--":
        word = rest.pop(0)
        if not word.startswith("-") or word == "-":
            arguments.append(word)
            continue
        options.append(word)
        action = takes.get(word)
        wants = action is not None and action.nargs is None
        may = action is not None and action.nargs == "?" and rest[:1] and rest[0].isdigit()
        if rest and (wants or may):
            options.append(rest.pop(0))
    return [*ahead, *arguments, *options, *rest]


class _Parser(argparse.ArgumentParser):
    """No abbreviated options: `--step` is not `--steps` by luck."""

    def __init__(self, **kwargs: object) -> None:
        given = {"allow_abbrev": False, "formatter_class": Help, **kwargs}
        super().__init__(**given)  # type: ignore[arg-type]

    def error(self, message: str) -> NoReturn:
        """As argparse does, but where a word is missing that is one of a few, with these."""
        nested = _nested(self)
        if nested is not None and message.endswith(f"required: {nested.metavar}"):
            names = ", ".join(nested.choices)
            message = (
                f"{nested.metavar} is missing, one of {names}; `{self.prog} --help` says what each "
                "does"
            )
        super().error(message)

    def _check_value(self, action: argparse.Action, value: object) -> None:
        """As argparse does, but with what was meant instead of a long list."""
        if action.choices is None or value in action.choices:
            return
        names = [str(choice) for choice in action.choices]
        raise argparse.ArgumentError(action, f"there is no {value}{_meant(str(value), names)}")


_ELSEWHERE = {  # what other programs call it
    "train": "up", "run": "up", "start": "up", "launch": "up", "serve": "web", "ui": "web",
    "dashboard": "web", "new": "init", "eval": "try", "sample": "try", "show": "inspect",
    "logs": "inspect", "status": "monitor", "stop": "control", "list": "web", "check": "doctor",
}  # fmt: skip


def _meant(word: str, names: Sequence[str]) -> str:
    from difflib import get_close_matches

    if _ELSEWHERE.get(word) in names:
        return f"; did you mean {_ELSEWHERE[word]}?"
    near = get_close_matches(word, names, n=1)
    return f"; did you mean {near[0]}?" if near else f"; it is one of {', '.join(names)}"


def _refuse(parser: argparse.ArgumentParser, args: argparse.Namespace, word: str) -> NoReturn:
    """End with the usage of the command that does not know an option or a word."""
    while (nested := _nested(parser)) is not None:
        parser = nested.choices[getattr(args, nested.dest)]
    if not word.startswith("-"):
        parser.error(f"{word} is an unexpected argument")
    known = [name for action in parser._actions for name in action.option_strings]
    option = word.partition("=")[0]
    parser.error(f"there is no option {option}{_meant(option, known)}")


def _nested(
    parser: argparse.ArgumentParser,
) -> argparse._SubParsersAction[argparse.ArgumentParser] | None:
    """The commands or actions below a command, if it has any."""
    kind = argparse._SubParsersAction
    return next((action for action in parser._actions if isinstance(action, kind)), None)


class _Version(argparse.Action):
    """Prints version and commit; the look-up costs 30 ms, so only when asked."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from importlib.metadata import PackageNotFoundError, version

        from rlstreams.workers.loop.host import commit

        try:
            of_commit = f" (commit {commit()})" if commit() else ""
            print(f"rlstreams {version('rlstreams')}{of_commit}")  # noqa: T201
        except PackageNotFoundError:
            print("rlstreams, not installed: run from", Path(__file__).parent.parent)  # noqa: T201
        parser.exit()


@cache
def parser_of_all() -> argparse.ArgumentParser:
    """The parser of every command."""
    parser = _Parser(
        prog="rlstreams",
        description="Asynchronous RL post-training of language models over Apache Kafka.",
        epilog="COMMAND --help has examples. Every command that reads a CONFIG also takes "
        "--section.field VALUE; if you name none, ./run.toml is used.",
    )
    parser.add_argument(
        "--version", action=_Version, nargs=0, help="print version and commit, and exit"
    )
    names = [name.replace("-", "_") + "_" * iskeyword(name) for name in COMMANDS]
    add_commands(parser, [f"rlstreams.cli.{name}" for name in names])
    return parser


def console() -> int:
    """What the installed script runs: `main`, and the process ends whatever still computes."""
    speak_any_text()
    try:
        status = main()
        end_within(status)
    finally:
        release_output()
    return status


if __name__ == "__main__":
    sys.exit(console())
