"""Declaration of commands: click's, which also list their arguments and take overrides.

A command is a function that gets the typed arguments as one `Namespace` and returns an exit status.
Its docstring is its help. A command that takes a configuration or a run has it as `args.config`:
names and overrides together, so `load(*args.config)`.
"""

from __future__ import annotations

import math
import os
import re
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, NamedTuple, NoReturn

import click

from rlstreams.workers.config.nearest import nearest

_OVERRIDE = re.compile(r"--[A-Za-z_]\w*\.[^=]+(=|$)")
Run = Callable[[Namespace], int]
option = click.option


class Named(NamedTuple):
    """A configuration or a run as it is named on the command line."""

    names: list[str]  # files or a folder; `./run.toml` where none was named
    overrides: list[str]  # every `--a.b VALUE` of the line


@dataclass(frozen=True, slots=True)
class Takes:
    """Meaning of the last words of a command line: their name in the usage line, and their help."""

    metavar: str
    about: str


CONFIG = Takes("CONFIG", "TOML files, merged from left to right")
RUN = Takes("RUN", "its folder or its TOML files")
LOG = Takes("RUN", f"{RUN.about}, or a recording")
OVERRIDES = Takes("", "")  # of a configuration that the command has itself


def split_overrides(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split a command line into the command's words, and the dotted overrides with their values.

    No option of ours has a dot, so the two cannot be mixed up. Behind `--` all are words.
    """
    own: list[str] = []
    overrides: list[str] = []
    rest = iter(words)
    for word in rest:
        match = _OVERRIDE.match(word)
        if match is None:
            own += [word, *rest] if word == "--" else [word]
            continue
        overrides.append(word)
        if not match.group(1):
            overrides += [value for value in [next(rest, None)] if value is not None]
    return own, overrides


class Command(click.Command):
    """Lists its arguments in its help, shows examples, and takes overrides with a configuration."""

    takes: Takes | None = None
    needs_names = True  # `./run.toml` must be there if nothing is named
    examples: Sequence[str] = ()  # as they are written
    appendix: Callable[[], str] = staticmethod(lambda: "")  # a function: the text is slow to make

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse as click does, without the overrides, which click does not know."""
        args, overrides = split_overrides(args)
        if overrides and self.takes is None:
            ctx.fail(f"{self.name} reads no configuration, so {overrides[0]} has no meaning")
        try:
            rest = super().parse_args(ctx, [*self._with_optional_values(args)])
        except click.NoSuchOption as err:
            self._refuse_section(ctx, err.option_name)
            hidden = {name for one in self.params if getattr(one, "hidden", 0) for name in one.opts}
            err.possibilities = [name for name in err.possibilities or () if name not in hidden]
            raise
        names = list(ctx.params.pop("config", None) or ())
        ctx.params = {name: _plain(value) for name, value in ctx.params.items()}
        if self.takes is not None:
            ctx.params["config"] = Named(names, overrides)
        return rest

    def _refuse_section(self, ctx: click.Context, option: str) -> None:
        """End with a usage error if an option is named like a section of the configuration."""
        from rlstreams.workers.config.fields import types_of
        from rlstreams.workers.config.run import RunConfig

        if self.takes is not None and option.removeprefix("--") in types_of(RunConfig):
            ctx.fail(f"{option} is a section: one field of it is set by {option}.FIELD=VALUE")

    def _with_optional_values(self, words: Sequence[str]) -> Iterator[str]:
        """Yield each word; `--web` gets its default value unless a number follows it."""
        plain = {
            name: str(one.flag_value)
            for one in self.params
            if isinstance(one, click.Option) and not one.is_flag and type(one.flag_value) is int
            for name in one.opts
        }
        for word, after in zip_longest(words, words[1:], fillvalue=""):
            yield word if word not in plain or after.isdigit() else f"{word}={plain[word]}"

    def invoke(self, ctx: click.Context) -> int:
        """Run it."""
        from rlstreams.workers.config.here import config_here

        named = ctx.params.get("config")
        if named is not None and self.needs_names and not named.names:
            named.names.append(config_here())
        assert self.callback is not None
        return int(self.callback(Namespace(**ctx.params)))

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write arguments first, then options."""
        own = [p for p in self.params if isinstance(p, Argument)]
        if own:
            with formatter.section("Arguments"):
                formatter.write_dl([(p.make_metavar(ctx), p.about) for p in own])
        super().format_options(ctx, formatter)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the examples, then the appendix."""
        del ctx
        with formatter.section("Examples"):
            for line in self.examples:
                formatter.write(f"  {line}\n")
        formatter.write(self.appendix())


def _plain(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value


class Argument(click.Argument):
    """A positional argument with a line of help."""

    def __init__(self, decls: Sequence[str], about: str = "", **attrs: Any) -> None:  # noqa: ANN401
        super().__init__(decls, **attrs)
        self.about = about


def argument(name: str, about: str, **attrs: Any) -> Callable[[Run], Run]:  # noqa: ANN401
    """Declare an argument, by its name in capitals."""
    if isinstance(kind := attrs.get("type"), click.Choice):
        about = "; ".join([", ".join(kind.choices), about])
    metavar = name if attrs.get("required", True) else f"[{name}]"
    return click.argument(name.lower(), cls=Argument, about=about, metavar=metavar, **attrs)


class CommandGroup(click.Group):
    """A command with actions, each typed as `NAME ACTION`."""

    def __init__(self, name: str, about: str, text: str = "", *, was: str = "") -> None:
        """Make a group.

        Args:
            was: the action that the bare name once stood for; an unknown action's message names it.
        """
        super().__init__(name, help=f"{about}\n\n{text}", no_args_is_help=False)
        self.was = was
        self.subcommand_metavar = "ACTION ..."

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse as click does; refuse a missing or unknown action with the list of actions."""
        if not args:
            refuse_nothing(ctx, "ACTION")
        if args[0] not in ctx.help_option_names and args[0] not in self.commands:
            self.refuse(ctx, args)
        return super().parse_args(ctx, args)

    def refuse(self, ctx: click.Context, args: Sequence[str]) -> NoReturn:
        """End with a usage error that names the nearest action."""
        names = self.list_commands(ctx)
        if self.was and not nearest(args[0], names):
            line = " ".join([ctx.command_path, self.was, *args])
            ctx.fail(f"{self.name} has the actions {', '.join(names)}: `{line}`?")
        ctx.fail(f"there is no {args[0]}{meant_word(args[0], names)}")

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the actions in the order of their declaration."""
        del ctx
        return list(self.commands)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write each action with the first line of its help."""
        del ctx
        with formatter.section("Actions"):
            write_commands(formatter, self.commands.values())


def write_commands(formatter: click.HelpFormatter, found: Iterable[click.Command]) -> None:
    """Write each command with the first line of its help uncut; click would cut it."""
    formatter.write_dl([(str(one.name), (one.help or "").partition("\n")[0]) for one in found])


def refuse_nothing(ctx: click.Context, what: str) -> NoReturn:
    """End with a usage error that lists the possible words, and what each does."""
    click.echo(ctx.get_help() + "\n", err=True)
    raise click.UsageError(f"{what} is missing: name one of these")


def meant_word(word: str, names: Sequence[str]) -> str:
    """Return the end of a sentence that refuses a word: the nearest name, or all names."""
    near = word if word in names else nearest(word, names)
    return f"; did you mean {near}?" if near else f"; it is one of {', '.join(names)}"


def command(
    name: str,
    *examples: str,
    of: CommandGroup | None = None,
    takes: Takes | None = None,
    needs_names: bool = True,
    appendix: Callable[[], str] = lambda: "",
    text: str = "",
) -> Callable[[Run], Command]:
    """Declare a function as a command, or as an action of a group.

    Args:
        examples: lines that begin with `rlstreams`; a test types each.
        takes: meaning of its last words; None: it takes no run.
        needs_names: False: it can do without `./run.toml`.
        appendix: makes the last lines of its help.
        text: its help instead of the docstring, for a function that serves several commands.
    """

    def declare(run: Run) -> Command:
        made = Command(name, callback=run, params=[*reversed(getattr(run, "__click_params__", []))])
        made.help = text or (run.__doc__ or "")
        made.examples, made.appendix = examples, appendix
        made.takes, made.needs_names = takes, needs_names
        if takes is OVERRIDES:
            made.needs_names = False
        elif takes is not None:
            about = f"{takes.about}; default: ./run.toml"
            metavar = f"[{takes.metavar} ...]"
            own = Argument(["config"], about, nargs=-1, metavar=metavar)
            made.params.append(own)
        if of is not None:
            of.add_command(made)
        return made

    return declare


class _Whole(click.IntRange):
    name = "whole number"  # as a message calls it

    def __init__(self, metavar: str, low: int | None, high: int | None = None) -> None:
        super().__init__(low, high)
        self.get_metavar = lambda param, ctx: metavar  # type: ignore[method-assign]


class _Real(click.FloatRange):
    name = "number"

    def __init__(self, metavar: str, low: float | None = None) -> None:
        super().__init__(low)
        self.get_metavar = lambda param, ctx: metavar  # type: ignore[method-assign]

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{value!r} is not a finite number.", param, ctx)
        return number


class _Setting(click.ParamType):
    name = "NAME=VALUE"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> str:
        """Check name and type before a run is opened. Raises ConfigError: no such field."""
        from rlstreams.workers.config.layers import override_layer

        name, equals, text = str(value).partition("=")
        if not equals:
            self.fail(f"{value!r} has no value; write NAME=VALUE.", param, ctx)
        override_layer(name, text)
        return str(value)


N = _Whole("N", 1)
COUNT = _Whole("COUNT", 0)
SEED = _Whole("SEED", None)
PORT = _Whole("PORT", 0, 65_535)
SECONDS = _Real("SECONDS", 0.0)
X = _Real("X")
SETTING = _Setting()


def one_of(*names: str) -> click.Choice[str]:
    """Return the type of an option that takes one of these names."""
    return click.Choice(names)


def hidden(*names: str) -> Callable[[Run], Run]:
    """Declare hidden options, which only our own processes pass."""

    def declare(run: Run) -> Run:
        for name in names:
            run = option(name, default="", hidden=True)(run)
        return run

    return declare


def set_threads(threads: int) -> None:
    """Set the number of torch's threads; call it before torch is imported, which reads it once."""
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ[name] = str(threads)
