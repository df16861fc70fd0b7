"""The console script `rlstreams`: finds the command, hands it its arguments, explains its errors.

Only the module of the command that is typed is imported; `rlstreams/cli/options.py` says how one is
declared.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from keyword import iskeyword
from pathlib import Path
from typing import NoReturn

import click

from rlstreams.cli.options import meant_word, refuse_nothing, write_commands
from rlstreams.streams.process import bytecode
from rlstreams.streams.process.descriptors import raise_limit
from rlstreams.workers.loop.ending import (
    release_output,
    speak_any_text,
    status_of,
    unwound_by_signals,
)
from rlstreams.workers.loop.runtime import end_within

SECTIONS: Mapping[str, Sequence[str]] = {
    "Begin": ("demo", "init", "try", "doctor", "config"),
    "Run": ("up", "worker", "control", "broker"),
    "Look": ("web", "inspect", "report", "metrics", "export"),
    "Account for it, and do it again": ("audit", "dead-letters", "record", "replay"),
}
COMMANDS = [name for names in SECTIONS.values() for name in names]
MOVED = {  # what an older page may still name
    "chaos": "a tool of the repository: `python -m tests.chaos CONFIG`",
    "diff": "`rlstreams record diff`",
    "engine": "`rlstreams config server` (the start command) and `rlstreams doctor --server URL`",
    "explain": "`rlstreams config loss`",
    "export-model": "`rlstreams export model`",
    "monitor": "`rlstreams metrics health`",
    "rerun-step": "`rlstreams replay step`",
    "topics": "`rlstreams broker topics` (apply) and `rlstreams broker tail`",
    "track": "`rlstreams metrics track`",
}
_ELSEWHERE = {  # what other programs call it
    "train": "up", "run": "up", "start": "up", "launch": "up", "serve": "web", "ui": "web",
    "dashboard": "web", "new": "init", "eval": "try", "sample": "try", "show": "inspect",
    "logs": "inspect", "status": "web", "stop": "control", "list": "web", "check": "doctor",
    "grpo": "up", "ppo": "up", "rl": "up",
}  # fmt: skip


class Program(click.Group):
    """All commands, by the sections of `--help`; each is imported when it is asked for."""

    subcommand_metavar = "COMMAND ..."

    def list_commands(self, ctx: click.Context) -> list[str]:
        """In the order of the help."""
        del ctx
        return COMMANDS

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The one command or group that a module declares under this name."""
        del ctx
        if cmd_name not in COMMANDS:
            return None
        module = import_module(
            f"rlstreams.cli.{cmd_name.replace('-', '_')}{'_' * iskeyword(cmd_name)}"
        )
        found = [value for value in vars(module).values() if isinstance(value, click.Command)]
        return next(one for one in found if one.name == cmd_name)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """As click does, but says what was meant."""
        word = args[0]
        if word in COMMANDS or word.startswith("-"):
            return super().resolve_command(ctx, args)
        _refuse(ctx, word)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """As click does, but names the commands where none is given."""
        if not args:
            refuse_nothing(ctx, "COMMAND")
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as err:  # click's nearest name of two would mislead
            option = err.option_name
            ctx.fail(f"no option {option} before a command; write rlstreams COMMAND {option} ...")

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """By section, each with the first line of its help."""
        for title, names in SECTIONS.items():
            with formatter.section(title):
                found = [self.get_command(ctx, name) for name in names]
                write_commands(formatter, filter(None, found))


def _refuse(ctx: click.Context, word: str) -> NoReturn:
    if word in MOVED:
        ctx.fail(f"`rlstreams {word}` is now {MOVED[word]}")
    ctx.fail(f"there is no {word}{meant_word(_ELSEWHERE.get(word, word), COMMANDS)}")


def _version(ctx: click.Context, _: click.Parameter, is_asked: bool) -> None:
    """Print version and commit; the look-up costs 30 ms, so only when asked."""
    if not is_asked:
        return
    from importlib.metadata import PackageNotFoundError, version

    from rlstreams.workers.loop.host import commit

    try:
        of_commit = f" (commit {commit()})" if commit() else ""
        click.echo(f"rlstreams {version('rlstreams')}{of_commit}")
    except PackageNotFoundError:
        click.echo(f"rlstreams, not installed: run from {Path(__file__).parent.parent}")
    ctx.exit()


PROGRAM = Program(
    "rlstreams",
    help="Asynchronous RL post-training of language models over Apache Kafka.",
    epilog="COMMAND --help has examples. Every command that reads a CONFIG also takes "
    "--section.field VALUE; if you name none, ./run.toml is used.",
    no_args_is_help=False,
    params=[
        click.Option(
            ["--version"], is_flag=True, is_eager=True, expose_value=False, callback=_version,
            help="Print version and commit, and exit.",
        )
    ],
)  # fmt: skip


def parsed(words: Sequence[str]) -> click.Context:
    """The command that a line names, with its values as `params`; nothing is run.

    Raises click.UsageError: it is no command of ours.
    """
    name: str | None = "rlstreams"
    found: click.Command | None = PROGRAM
    rest, context = list(words), None
    while isinstance(found, click.Group):
        context = found.make_context(name, [*rest], parent=context)
        name, found, rest = found.resolve_command(context, rest)
    assert found is not None
    return found.make_context(name, rest, parent=context)


def main(argv: Sequence[str] | None = None, program: click.Command = PROGRAM) -> int:
    """Run one command; returns the exit status that the process should end with."""
    from rlstreams.streams.log.errors import StreamsError
    from rlstreams.workers.loop.runtime import OwnerAliveError, exit_status, explain

    words = list(sys.argv[1:] if argv is None else argv)
    try:
        with unwound_by_signals():
            context = program.make_context(program.name, words)
            os.getcwd()  # of one that was deleted everything says something else
            with context:
                status = int(program.invoke(context))
            sys.stdout.flush()
    except click.exceptions.Exit as err:  # of --help and --version
        status = err.exit_code
    except click.ClickException as err:
        err.show()
        status = err.exit_code
    except (StreamsError, OwnerAliveError) as err:
        explain(err)
        status = exit_status(err)
    except KeyboardInterrupt:
        status = 128 + signal.SIGINT
    except (OSError, SystemExit) as err:
        status = status_of(err)
    return status


def console(program: click.Command = PROGRAM) -> int:
    """Run `main` as the installed script; the process ends even if a thread still computes."""
    speak_any_text()
    raise_limit()
    bytecode.keep()
    try:
        status = main(program=program)
        end_within(status)
    finally:
        release_output()
    return status


if __name__ == "__main__":
    sys.exit(console())
