"""`rlstreams record RUN_DIR|CONFIG`: a run's topics as Avro files, live or afterwards."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from rlstreams.cli.arguments import add_run, configuration, examples, opened_run
from rlstreams.cli.ranges import add_selection

if TYPE_CHECKING:
    from rlstreams.debug.replay.record import RecordingOptions, RecordingResult
    from rlstreams.streams.log.bus import Bus
    from rlstreams.streams.recording.recorder import Progress
    from rlstreams.workers.config.run import RunConfig


def add(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the command."""
    parser = subparsers.add_parser(
        "record",
        help="copy a run's topics to Avro files with an index, live or afterward",
        description="Records up to the current end of the topics; --follow continues until the "
        "run is done. The same command continues an interrupted recording.",
        epilog=examples(
            "rlstreams record runs/demo",
            "rlstreams record run.toml --follow --weights --checkpoints",
            "rlstreams record runs/demo --steps 10:20 --out ten-steps",
        ),
    )
    add_run(parser)
    parser.add_argument(
        "--out", default="", metavar="DIR", help="folder of the recording (recordings/RUN_ID)"
    )
    parser.add_argument("--follow", action="store_true", help="until the run is done, or Ctrl-C")
    parser.add_argument(
        "--weights",
        action="store_true",
        help="copy the run's weight versions, for replays of the log-prob role",
    )
    parser.add_argument(
        "--checkpoints", action="store_true", help="copy its checkpoints, for rerun-step"
    )
    add_selection(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Record and say what is there; 0 once the recording is sealed, with every event read."""
    from rlstreams.debug.replay.record import record
    from rlstreams.workers.loop.runtime import Stop

    config = configuration(args.config, args.overrides)
    stop = Stop()
    if args.follow:
        stop.on_signals()
    with opened_run(config) as log:
        options = _recording_options(args, log.bus, config)
        result = record(
            log.bus,
            config,
            options,
            stopped=lambda: stop.requested,
            on_progress=_show if sys.stderr.isatty() else lambda _: None,
        )
    return _tell(result, options)


def _recording_options(args: argparse.Namespace, bus: Bus, config: RunConfig) -> RecordingOptions:
    from dataclasses import replace

    from rlstreams.cli.ranges import selection_of, words_of
    from rlstreams.debug.replay.record import RecordingOptions
    from rlstreams.streams.log.errors import ConfigError
    from rlstreams.streams.recording.recorder import groups_of_steps

    selection = selection_of(args)
    if selection.steps is not None:
        groups = groups_of_steps(bus, selection.steps)
        if not groups:
            raise ConfigError(f"--steps {args.steps}: the run has completed none of these steps")
        selection = replace(selection, groups=(selection.groups or groups) & groups)
    return RecordingOptions(
        folder=Path(args.out or f"recordings/{config.run.id}"),
        selection=selection,
        words=words_of(args),
        is_followed=args.follow,
        with_weights=args.weights,
        with_checkpoints=args.checkpoints,
    )


def _show(progress: Progress) -> None:
    from rlstreams.streams.log.counted import counted

    behind = f", {counted(progress.behind, 'offset')} behind" if progress.behind else ""
    line = f"{counted(progress.num_records, 'record')}, {progress.num_bytes / 1e6:,.1f} MB{behind}"
    print(f"\r\033[K{line}", end="", file=sys.stderr, flush=True)


def _tell(result: RecordingResult, options: RecordingOptions) -> int:
    """What is there; the exit status."""
    from rlstreams.streams.log.counted import counted

    if sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr)
    size = sum(file.size_bytes for file in result.manifest.files if file.name.endswith(".avro"))
    print(f"{'topic':<20} {'records':>10}  offsets")
    for name, topic in result.manifest.topics.items():
        spans = " ".join(f"{topic.first[p]}:{topic.next[p]}" for p in sorted(topic.next, key=int))
        print(f"{name:<20} {topic.num_records:>10,}  {spans}")
    again = f", continued: {result.num_new:,} of them new" if result.is_resumed else ""
    print(
        f"{options.folder}: {counted(result.num_records, 'record')}, "
        f"{size / 1e6:,.1f} MB in Avro files "
        f"({result.num_bytes / 1e6:,.1f} MB read in {result.seconds:.1f} s{again})"
    )
    if not result.unasked:
        return 0
    told = ", ".join(
        f"schema {print_} ({counted(num, 'record')})"
        for print_, num in sorted(result.unasked.items())
    )
    print(
        f"{options.folder} is sealed, but holds records as bytes alone, for the broker was gone "
        f"before their schema could be asked for: {told}. If it can be started again, record the "
        "run again into another folder",
        file=sys.stderr,
    )
    return 1
