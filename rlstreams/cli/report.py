"""`rlstreams report RUN_DIR`: one HTML page and the learning curve of a run."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rlstreams.cli.arguments import Commands, add_run, command, configuration, opened_run

if TYPE_CHECKING:
    from rlstreams.workers.config.run import RunConfig


def add(subparsers: Commands) -> None:
    """Add the command."""
    parser = command(
        subparsers,
        "report",
        run,
        """
        one HTML page and the learning curve of a finished or running run

        Reads the run's topics; writes report.html and curve.png into its folder.

        --out DIR  folder for the files (the run's)

        rlstreams report runs/demo
        rlstreams report runs/demo --out public
        """,
    )
    add_run(parser)


def run(args: argparse.Namespace) -> int:
    """Write the files and say where they are."""
    from datetime import UTC, datetime

    from rlstreams.show.report.collect import collect, write

    config = configuration(args.config, args.overrides)
    made_at = f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC"
    with opened_run(config) as log:
        given = collect(log.bus, config.run.id, decode=_decoder(config), made_at=made_at)
    written = write(given, Path(args.out or config.folder))
    print(f"report: {written.page}\ncurve:  {written.curve}")
    return 0


def _decoder(config: RunConfig) -> Callable[[Sequence[int]], str]:
    from rlstreams.streams.log.errors import ConfigError
    from rlstreams.up.live.words import spell
    from rlstreams.workers.config.hub import model_folder
    from rlstreams.workers.model.tokenizer import Tokenizer, TokenizerError

    try:
        return Tokenizer.load(model_folder(config.model.path)).decode
    except (ConfigError, TokenizerError):
        return spell  # the model folder is gone; numbers still show what changed
