"""`rlstreams report RUN_DIR`: one HTML page and the learning curve of a run."""

from __future__ import annotations

import argparse
from pathlib import Path

from rlstreams.cli.arguments import Commands, add_run, command, opened, several


def add(subparsers: Commands) -> None:
    """Add the command."""
    parser = command(
        subparsers,
        "report",
        run,
        """
        one HTML page and the learning curve of a finished or running run

        Reads the run's topics; writes report.html, steps.csv and curve.png into its folder. Of
        several runs' folders it writes comparison.html here: their charts, and what differs.

        --out DIR  folder for the files (the run's)

        rlstreams report runs/demo
        rlstreams report runs/demo --out public
        rlstreams report runs/demo runs/demo-seed1
        """,
    )
    add_run(parser, is_log=True)


def run(args: argparse.Namespace) -> int:
    """Write the files and say where they are."""
    from datetime import UTC, datetime

    from rlstreams.debug.inspect.words import spelling
    from rlstreams.show.report.collect import collect, write, write_comparison

    made_at = f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC"
    found = []
    for names in several(args.config):
        with opened(names, args.overrides) as source:
            spelled = spelling("", source.model_path)
            name = source.config.run.id if source.config else source.folder.name
            found.append(collect(source.log, name, spelling=spelled, made_at=made_at))
            folder = source.folder
    if len(found) > 1:
        print(f"comparison: {write_comparison(found, Path(args.out or '.'))}")
        return 0
    written = write(found[0], Path(args.out or folder))
    print(f"report: {written.page}\ncurve:  {written.curve}")
    return 0
