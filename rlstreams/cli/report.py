"""`rlstreams report RUN`: one HTML page of a run, and its steps as CSV."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from rlstreams.cli.named import opened
from rlstreams.cli.options import LOG, command, option
from rlstreams.streams.log.errors import ConfigError
from rlstreams.words.spelling import spelling


@command(
    "report",
    "rlstreams report runs/demo",
    "rlstreams report runs/demo --out public",
    takes=LOG,
)
@option("--out", metavar="DIR", help="folder for the files (the run's)", default="")
def run(args: Namespace) -> int:
    """one HTML page of a finished or running run, and its steps as CSV

    Reads the run's topics; writes report.html and steps.csv into its folder.
    """
    from rlstreams.show.report.collect import PAGE_FILE, STEPS_FILE, collect, write

    if Path(args.out).suffix == ".html" or Path(args.out).is_file():
        files = f"{PAGE_FILE} and {STEPS_FILE}"
        raise ConfigError(f"--out {args.out}: name a folder; {files} are written into it")
    with opened(*args.config) as source:
        name = source.config.run.id if source.config else source.folder.name
        spelled = spelling("", source.model_path)
        given = collect(source.log, name, spelling=spelled)
    folder = Path(args.out or source.folder)
    write(given, folder)
    print(f"report: {folder / PAGE_FILE}")
    return 0
