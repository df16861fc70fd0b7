"""Arguments that commands share: naming a run, opening it, examples in the help."""

from __future__ import annotations

import argparse
import inspect
import math
import os
import re
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from itertools import chain
from keyword import iskeyword
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlstreams.streams.log.errors import ConfigError
from rlstreams.streams.log.text import plain_json

if TYPE_CHECKING:
    from rlstreams.streams.run.run_log import RunLog
    from rlstreams.workers.config.run import RunConfig

    Commands = argparse._SubParsersAction[argparse.ArgumentParser]
else:
    Commands = argparse._SubParsersAction

EXAMPLES = "examples:\n"
LINE_EVERY_S = 10.0  # of progress that no terminal shows
_LINE = re.compile(r"(--[\w-]+|[A-Z]+)(?: (\S+))? {2,}(.*)")
_DEFAULT = re.compile(r"(.*) \[([^]]+)]")
_CHOICES = re.compile(r"[a-z0-9-]+(\|[a-z0-9-]+)+")


@dataclass(frozen=True, slots=True)
class Takes:
    """What the last words of a command line mean: `args.config`, empty if there is none."""

    metavar: str
    about: str


CONFIG = Takes("CONFIG", "TOML files, merged from left to right")
RUN = Takes("RUN", "its folder or its TOML files")
LOG = Takes("RUN", f"{RUN.about}, or a recording")


class Help(argparse.HelpFormatter):
    """Wraps text, but leaves examples as they are written."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return text if text.startswith(EXAMPLES) else super()._fill_text(text, width, indent)


def set_threads(threads: int) -> None:
    """How many threads torch computes with, for when it is imported: it reads them once."""
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ[name] = str(threads)


Run = Callable[[argparse.Namespace], int]
_Declared = tuple[str, Callable[["Commands", str], None]]
_declared: dict[str, list[_Declared]] = {}  # by module: name, and what adds its parser
_groups: dict[str, tuple[str, str]] = {}  # help and description of a command that has actions


def group(name: str, about: str, description: str = "") -> None:
    """A command that has actions: each is declared as `NAME ACTION`."""
    _groups[name] = about, description


def command(
    name: str,
    takes: Takes | None = None,
    *,
    usage: str | None = None,
    text: str = "",
    hidden: Sequence[str] = (),
    settings: Mapping[str, Mapping[str, object]] | None = None,
    defaults: Mapping[str, object] | None = None,
    appendix: Callable[[], str] = lambda: "",
) -> Callable[[Run], Run]:
    """Declare a command: the function that does it, whose docstring is its help.

    The docstring has its line in the list of commands, and paragraphs: what its help says first;
    arguments and options; examples, which begin with `rlstreams` and are parsed by a test. An
    option reads as its help does: `--last N  how many [10]` takes a number, 10 if it is not given.

    Args:
        text: instead of the docstring, where one function does several things.
        hidden: options that only our own processes give.
        settings: argparse's own, by option.
        defaults: attributes of the parsed arguments that no option sets.
        appendix: what its help says last.
    """

    def declare(run: Run) -> Run:
        def add(commands: Commands, own_name: str) -> None:
            about, *paragraphs = inspect.cleandoc(text or run.__doc__ or "").split("\n\n")
            shown = [p for p in paragraphs if p.startswith("rlstreams ")]
            lines = [p for p in paragraphs if _LINE.match(p)]
            told = [" ".join(p.split()) for p in paragraphs if p not in {*shown, *lines}]
            parser = commands.add_parser(
                own_name,
                help=about,
                description=" ".join(told) or None,
                epilog=EXAMPLES + textwrap.indent("\n".join(shown), "  ") + appendix(),
                usage=usage,
            )
            _add_lines(parser, "\n".join(lines), settings or {})
            for option in hidden:
                parser.add_argument(option, default="", help=argparse.SUPPRESS)
            if takes is not None:  # with a default, or argparse lists it among what is required
                help_text = f"{takes.about}; default: ./run.toml"
                parser.add_argument(
                    "config", nargs="*", default=[], metavar=takes.metavar, help=help_text
                )
            parser.set_defaults(run=run, **(defaults or {}))

        _declared.setdefault(run.__module__, []).append((name, add))
        return run

    return declare


def add_commands(parser: argparse.ArgumentParser, modules: Sequence[str]) -> None:
    """Give a parser every command that these modules declare, in this order."""
    top = parser.add_subparsers(
        dest="command", metavar="COMMAND", required=True, parser_class=type(parser)
    )
    below = {"": top}
    for module in modules:
        import_module(module)
    for name, add in chain.from_iterable(_declared[module] for module in modules):
        above, _, own_name = name.rpartition(" ")
        if above not in below:
            about, description = _groups[above]
            one = top.add_parser(above, help=about, description=description)
            below[above] = one.add_subparsers(dest="action", metavar="ACTION", required=True)
        add(below[above], own_name)


def _add_lines(
    parser: argparse.ArgumentParser, text: str, settings: Mapping[str, Mapping[str, object]]
) -> None:
    """One argument a line, two spaces before its help, which goes on in the next lines.

    An option that names no value is a flag; `a|b` are its choices, and `X...` may be repeated.
    """
    entries: list[list[str]] = []
    for line in map(str.strip, text.splitlines()):
        if match := _LINE.fullmatch(line):
            entries.append([*match.groups("")])
        else:
            entries[-1][2] += f" {line}"
    for name, value, about in entries:
        given: dict[str, Any] = {"help": about}
        if match := _DEFAULT.fullmatch(about):
            given = {"help": f"{match[1]} ({match[2]})", "default": match[2]}
        if _CHOICES.fullmatch(value):
            given["choices"] = value.split("|")
        elif value.endswith("..."):
            given |= {"action": "append", "default": []}
        elif kind := TYPES.get(value or name):
            given["type"] = kind
        if not name.startswith("--"):
            parser.add_argument(name.lower(), metavar=name, **given)
            continue
        if value:
            default = None if "type" in given else ""
            given = {"metavar": value, "default": default, **given}
        else:
            given["action"] = "store_true"
        dest = name[2:].replace("-", "_")
        dest += "_" * iskeyword(dest)
        parser.add_argument(name, dest=dest, **given | dict(settings.get(name, {})))


def _number(
    kind: Callable[[str], float], low: float, high: float = math.inf
) -> Callable[[str], float]:
    """The `type` of an option that takes a finite number from `low` to `high`."""

    def parsed(text: str) -> float:
        try:
            number = kind(text)
        except ValueError:
            number = math.nan
        if not math.isfinite(number):
            name = "a whole number" if kind is int else "a number"
            raise argparse.ArgumentTypeError(f"must be {name}, got {text!r}")
        if not low <= number <= high:
            bound = f"{low:g} or above" if high == math.inf else f"{low:g} to {high:g}"
            raise argparse.ArgumentTypeError(f"must be {bound}, got {text}")
        return number

    return parsed


TYPES: Mapping[str, Callable[[str], object]] = {
    "N": _number(int, 1),
    "COUNT": _number(int, 0),
    "PORT": _number(int, 0, 65_535),
    "SECONDS": _number(float, 0.0),
    "SEED": _number(int, -math.inf),
    "X": _number(float, -math.inf),
}  # of a value, by its name in the help


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedRun:
    """A run or a recording that was named on the command line, open."""

    log: RunLog
    folder: Path
    model_path: str  # as its configuration names it; empty if there is none
    config: RunConfig | None = None  # None: a recording's, which may be another release's


@contextmanager
def opened(
    names: Sequence[str], overrides: Sequence[str], say: Callable[[str], None] | None = None
) -> Iterator[NamedRun]:
    """What `names` mean: a run's folder, TOML files (none: `./run.toml`), or a recording.

    Args:
        say: told what takes a while; None: it is said on stderr.

    Raises:
        ConfigError: neither a run nor a recording; names those that are there.
        BrokerError: the run's broker cannot be reached or started.
    """
    from rlstreams.streams.run.open_run import open_run
    from rlstreams.streams.run.places import check_place
    from rlstreams.streams.run.recorded_log import is_recording
    from rlstreams.workers.config.here import config_here

    names = names or [config_here()]
    if is_recording(names[0]):
        if len(names) > 1 or overrides:
            raise ConfigError(f"{names[0]}: a recording has its own configuration; name it alone")
        with open_run(names[0]) as recorded:
            path = str(recorded.configuration.get("model", {}).get("path", ""))
            yield NamedRun(log=recorded, folder=Path(names[0]), model_path=path)
        return
    check_place(names[0])
    config = configuration(names, overrides)
    with opened_run(config, say) as log:
        folder = Path(config.folder)
        yield NamedRun(log=log, folder=folder, model_path=config.model.path, config=config)


def several(names: Sequence[str]) -> list[list[str]]:
    """The runs that are named: each folder is one, TOML files are one together."""
    return [[name] for name in names] if all(map(os.path.isdir, names)) else [list(names)]


def opened_run(config: RunConfig, say: Callable[[str], None] | None = None) -> RunLog:
    """The run's log; what takes a while is said on stderr. Raises as `open_run`."""
    from rlstreams.streams.run.open_run import open_run
    from rlstreams.workers.bootstrap.parts import place_of

    return open_run(place_of(config), say=say or Progress())


def configuration(names: Sequence[str], overrides: Sequence[str]) -> RunConfig:
    """Of a run's folder as `up` left it, or of TOML files; of `./run.toml` if nothing is named.

    Raises:
        ConfigError: no such folder, one without `config.json`, or files that cannot be used; names
            the runs that are there.
    """
    from rlstreams.streams.run.places import RUNS, check_place
    from rlstreams.workers.config.here import config_here
    from rlstreams.workers.config.load import load, read_json

    names = names or [config_here()]
    check_place(names[0], [RUNS])
    folder = Path(names[0])
    if not folder.is_dir():
        return load(names, overrides)
    if len(names) > 1 or overrides:
        raise ConfigError(f"{folder}: a run's folder has its own configuration; name it alone")
    config = read_json(folder / "config.json")
    # The folder may have been moved, or named from elsewhere, since it was written.
    return replace(config, run=replace(config.run, dir=str(folder)))


def print_json(*values: object) -> None:
    """What `--json` prints: a JSON object a line, of dicts or of dataclasses."""
    import msgspec

    for value in values:
        print(plain_json(msgspec.to_builtins(value, enc_hook=str)), flush=True)


class Progress:
    """What takes a while, on stderr: one line that changes, or in a file a line now and then."""

    def __init__(self) -> None:
        self._shown, self._due_s = "", 0.0

    def __call__(self, text: str) -> None:
        """Show `text` instead of what was shown; "": nothing."""
        if sys.stderr.isatty():
            if text or self._shown:
                print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)
            self._shown = text
        elif text and time.monotonic() >= self._due_s:
            print(text, file=sys.stderr, flush=True)
            self._due_s = time.monotonic() + LINE_EVERY_S
