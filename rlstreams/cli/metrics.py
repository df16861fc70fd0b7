"""`rlstreams metrics RUN`: the figures of a run for other programs, read from its log."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from rlstreams.cli.arguments import RUN, command, configuration, opened_run
from rlstreams.streams.log.errors import BrokerError, ConfigError
from rlstreams.streams.log.text import counted

if TYPE_CHECKING:
    from rlstreams.show.metrics.rows import Sink
    from rlstreams.streams.log.bus import Bus

STDOUT = "-"


@command("metrics", RUN)
def run(args: argparse.Namespace) -> int:
    """figures by step as JSON lines, CSV or for Prometheus; for trackers: `track`

    Reads the log and touches nothing: while the run goes on, afterwards, or again from the
    beginning, each time with the same figures. Files have a row for each step and each
    evaluation; prometheus answers scrapes with the present state until Ctrl-C.

    --follow   go on until the run is over or Ctrl-C
    --out FILE  - is standard output [-]
    --port PORT  of prometheus [9400]
    --format jsonl|csv|prometheus  what is written [jsonl]

    rlstreams metrics runs/demo --out steps.csv --format csv
    rlstreams metrics runs/demo --follow
    rlstreams metrics runs/demo --format prometheus --port 9400
    """
    if args.format == "csv" and args.follow:
        raise ConfigError("a CSV table is written when its last row is known: follow with jsonl")
    config = configuration(args.config, args.overrides)
    with opened_run(config) as log:
        if args.format == "prometheus":
            _serve(log.bus, config.run.id, args.port)
            return 0
        from rlstreams.show.metrics.rows import MetricRows, read_rows

        with _sink(args) as sink, suppress(KeyboardInterrupt):
            view = MetricRows(has_held_out=config.data.has_held_out)
            num_rows = read_rows(log.bus, sink, view, follow=args.follow)
            print(f"{counted(num_rows, 'row')} in {args.out}", file=sys.stderr)
    return 0


@contextmanager
def _sink(args: argparse.Namespace) -> Iterator[Sink]:
    """Where rows go, finished at the end whatever ends it."""
    from contextlib import closing

    from rlstreams.show.metrics.rows import CsvTable, JsonLines

    kind = CsvTable if args.format == "csv" else JsonLines
    path = Path(args.out)
    path.parent.mkdir(parents=True, exist_ok=True)
    opening = nullcontext(sys.stdout) if args.out == STDOUT else path.open("w", encoding="utf-8")
    with opening as file, closing(kind(file)) as table:
        yield table


def _serve(bus: Bus, run_id: str, port: int) -> None:
    from rlstreams.show.metrics.prometheus import served
    from rlstreams.streams.views.feed import Feed, Views

    views = Views()
    feed, latest = Feed(bus, views), views.state  # a frozen snapshot, for another thread
    try:
        with (
            served(run_id, lambda: latest, port) as found,
            suppress(KeyboardInterrupt, BrokerError),
        ):
            print(f"metrics of run {run_id}: http://127.0.0.1:{found}/metrics", file=sys.stderr)
            due_s = 0.0
            while True:
                num_records = feed.poll(1.0)
                if not num_records or time.monotonic() >= due_s:
                    latest = views.state
                    due_s = time.monotonic() + 1.0
    finally:
        feed.close()
