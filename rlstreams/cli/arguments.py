"""What commands have in common: how to name a run on the command line, and examples in the help."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable

EXAMPLES = "examples:\n"
_HERE = "default: ./run.toml"


class Help(argparse.HelpFormatter):
    """Wraps text, but leaves examples as they are written."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return text if text.startswith(EXAMPLES) else super()._fill_text(text, width, indent)


def set_threads(threads: int) -> None:
    """How many threads torch computes with, for when it is imported: it reads them once."""
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ[name] = str(threads)


def examples(*lines: str) -> str:
    """The end of a command's help; a test parses each line."""
    return EXAMPLES + "\n".join(f"  {line}" for line in lines)


def add_config(parser: argparse.ArgumentParser) -> None:
    """The TOML files of a run to start: `config`, empty if none is named."""
    about = f"TOML files, merged from left to right; {_HERE}"
    # With a default, or argparse lists it among what is required.
    parser.add_argument("config", nargs="*", default=[], metavar="CONFIG", help=about)


def add_run(
    parser: argparse.ArgumentParser, *, metavar: str = "RUN", before: str = "", is_log: bool = False
) -> None:
    """An existing run: `config`, for `rlstreams.cli.report.configuration`.

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
