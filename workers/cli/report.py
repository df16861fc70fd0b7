"""`rlstreams report RUN_DIR`: one HTML page and the learning curve of a run."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from workers.cli.arguments import add_run, examples

if TYPE_CHECKING:
    from workers.config.run import RunConfig


def add(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "report",
        help="one HTML page and the learning curve of a finished or running run",
        description="Reads the run's topics; writes report.html and curve.png into its folder.",
        epilog=examples(
            "rlstreams report runs/demo",
            "rlstreams report runs/demo --out public",
        ),
    )
    add_run(parser)
    parser.add_argument("--out", default="", metavar="DIR", help="folder for the files (the run's)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Write the files and say where they are."""
    from datetime import UTC, datetime

    from workers.report.collect import collect, write
    from workers.runs.attach import attached

    config = configuration(args.config, args.overrides)
    made_at = f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC"
    with attached(config) as bus:
        given = collect(bus, config.run.id, decode=_decoder(config), made_at=made_at)
    written = write(given, Path(args.out or config.folder))
    print(f"report: {written.page}\ncurve:  {written.curve}")
    return 0


def configuration(names: Sequence[str], overrides: Sequence[str]) -> RunConfig:
    """Of a run's folder as `up` left it, or of TOML files; of `./run.toml` if nothing is named.

    Raises:
        ConfigError: no such folder, one without `config.json`, or files that cannot be used; names
            the runs that are there.
    """
    from dataclasses import replace

    from streams.errors import ConfigError
    from workers.config.load import load, read_json
    from workers.project import config_here
    from workers.runs.places import RUNS, check_place

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


def _decoder(config: RunConfig) -> Callable[[Sequence[int]], str]:
    from streams.errors import ConfigError
    from workers.hub import model_folder
    from workers.live.words import spell
    from workers.tokenizer import Tokenizer, TokenizerError

    try:
        return Tokenizer.load(model_folder(config.model.path)).decode
    except (ConfigError, TokenizerError):
        return spell  # the model folder is gone; numbers still show what changed
