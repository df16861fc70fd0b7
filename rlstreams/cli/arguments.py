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
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlstreams.streams.run.run_log import RunLog
    from rlstreams.workers.config.run import RunConfig

    Commands = argparse._SubParsersAction[argparse.ArgumentParser]
else:
    Commands = argparse._SubParsersAction

EXAMPLES = "examples:\n"
LINE_EVERY_S = 10.0  # of progress that no terminal shows
_OPTION = re.compile(r"(--[\w-]+)(?: (\S+))? {2,}(.*)")
_HERE = "default: ./run.toml"


class Help(argparse.HelpFormatter):
    """Wraps text, but leaves examples as they are written."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return text if text.startswith(EXAMPLES) else super()._fill_text(text, width, indent)


def set_threads(threads: int) -> None:
    """How many threads torch computes with, for when it is imported: it reads them once."""
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ[name] = str(threads)


def command(
    commands: Commands,
    name: str,
    run: Callable[[argparse.Namespace], int],
    text: str,
    usage: str | None = None,
    **settings: Mapping[str, object],
) -> argparse.ArgumentParser:
    """Register a command.

    Args:
        run: does it and returns the exit status.
        text: its line in the list of commands, and paragraphs: what its help says first, its
            options, examples, which begin with `rlstreams` and are parsed by a test.
        settings: as of `options`.
    """
    about, *paragraphs = inspect.cleandoc(text).split("\n\n")
    told = {"--": "", "rlstreams ": "", "": ""}
    for paragraph in paragraphs:
        told[next(begin for begin in told if paragraph.startswith(begin))] = paragraph
    parser = commands.add_parser(
        name,
        help=about,
        description=" ".join(told[""].split()) or None,
        epilog=EXAMPLES + textwrap.indent(told["rlstreams "], "  "),
        usage=usage,
    )
    parser.set_defaults(run=run)
    options(parser, told["--"], **settings)
    return parser


def options(
    parser: argparse._ActionsContainer, text: str, **settings: Mapping[str, object]
) -> None:
    """Options as their help reads: `--every SECONDS  mean time between two faults`.

    Args:
        text: one a line, two spaces before its help, which goes on in the next lines. One that
            names no value is a flag.
        settings: argparse's, by option and `_`: `every_={"type": real(0.0), "default": 5.0}`.
    """
    entries: list[list[str]] = []
    for line in filter(None, map(str.strip, text.splitlines())):
        if match := _OPTION.fullmatch(line):
            entries.append([*match.groups("")])
        else:
            entries[-1][2] += f" {line}"
    for name, value, about in entries:
        own = settings.get(name[2:].replace("-", "_") + "_", {})
        given: dict[str, Any] = {**own, "help": about}
        if value:
            default = None if "type" in given else ""
            given = {"metavar": value, "default": default, **given}
        else:
            given["action"] = "store_true"
        parser.add_argument(name, **given)


def add_config(parser: argparse.ArgumentParser) -> None:
    """The TOML files of a run to start: `config`, empty if none is named."""
    about = f"TOML files, merged from left to right; {_HERE}"
    # With a default, or argparse lists it among what is required.
    parser.add_argument("config", nargs="*", default=[], metavar="CONFIG", help=about)


def add_run(
    parser: argparse.ArgumentParser, *, metavar: str = "RUN", before: str = "", is_log: bool = False
) -> None:
    """An existing run: `config`, for `configuration` or `opened`.

    With `is_log` a recording is accepted too. `before` describes what may precede the run.
    """
    kinds = "its folder or its TOML files" + (", or a recording" if is_log else "")
    about = f"{before}{'RUN: ' if before else ''}{kinds}; {_HERE}"
    parser.add_argument("config", nargs="*", default=[], metavar=metavar, help=about)


def add_no_live(parser: argparse.ArgumentParser) -> None:
    """Whether the live view is shown on a terminal: `no_live`."""
    parser.add_argument(
        "--no-live", action="store_true", help="plain lines instead of the live view"
    )


def whole(low: int, high: float = math.inf) -> Callable[[str], int]:
    """The `type` of an option that takes a whole number from `low` to `high`."""

    def parsed(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"must be a whole number, got {text!r}") from None
        _check(number, text, low, high)
        return number

    return parsed


def real(low: float) -> Callable[[str], float]:
    """The `type` of an option that takes a finite number of `low` or more."""

    def parsed(text: str) -> float:
        try:
            number = float(text)
        except ValueError:
            number = math.nan
        if not math.isfinite(number):
            raise argparse.ArgumentTypeError(f"must be a number, got {text!r}")
        _check(number, text, low, math.inf)
        return number

    return parsed


def _check(number: float, text: str, low: float, high: float) -> None:
    if low <= number <= high:
        return
    bound = f"{low:g} or above" if high == math.inf else f"{low:g} to {high:g}"
    raise argparse.ArgumentTypeError(f"must be {bound}, got {text}")


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
    from rlstreams.streams.log.errors import ConfigError
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
    from rlstreams.streams.log.errors import ConfigError
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

    from rlstreams.streams.log.text import plain_json

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
