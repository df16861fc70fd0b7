"""`rlstreams record ACTION`: a run's topics as Parquet files, and differences of two runs."""

from __future__ import annotations

import tempfile
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rlstreams.cli.named import ProgressLine, configuration, opened, opened_run, print_json
from rlstreams.cli.options import RUN, CommandGroup, argument, command, option
from rlstreams.streams.log.text import counted, utc_text
from rlstreams.workers.loop.runtime import Stop

if TYPE_CHECKING:
    from rlstreams.debug.replay.record import RecordingOptions, RecordingResult
    from rlstreams.streams.recording import Recording
    from rlstreams.streams.recording.recorder import RecordingProgress

RECORD = CommandGroup(
    "record", "a run's topics as Parquet files: make, list, verify, compare", was="run"
)


@command(
    "run",
    "rlstreams record run runs/demo",
    "rlstreams record run run.toml --follow --weights --checkpoints",
    of=RECORD,
    takes=RUN,
)
@option("--out", metavar="DIR", help="folder of the recording (recordings/RUN_ID)", default="")
@option("--follow", is_flag=True, help="until the run is done, or Ctrl-C")
@option(
    "--weights",
    is_flag=True,
    help="copy the run's weight versions, for replays of the log-prob role",
)
@option("--checkpoints", is_flag=True, help="copy its checkpoints, for `replay step`")
def run(args: Namespace) -> int:
    """copy a run's topics to Parquet files, live or afterward

    Records up to the current end of the topics; --follow continues until the run is done. The
    same command continues an interrupted recording.
    """
    from rlstreams.debug.replay.record import RecordingOptions, record

    config = configuration(*args.config)
    stop, show = Stop(), ProgressLine()
    if args.follow:
        stop.on_signals()
    with opened_run(config) as log:
        options = RecordingOptions(
            folder=Path(args.out or f"recordings/{config.run.id}"),
            is_followed=args.follow,
            with_weights=args.weights,
            with_checkpoints=args.checkpoints,
        )
        result = record(
            log.bus,
            config,
            options,
            stopped=lambda: stop.requested,
            on_progress=lambda now: show(_line_of(now)),
        )
    show("")
    _print_result(result, options)
    return 0


def _line_of(progress: RecordingProgress) -> str:
    behind = f", {counted(progress.behind, 'offset')} behind" if progress.behind else ""
    return f"{counted(progress.num_records, 'record')}, {progress.num_bytes / 1e6:,.1f} MB{behind}"


def _print_result(result: RecordingResult, options: RecordingOptions) -> None:
    """Print the records and offsets of each topic, then the recording's totals."""
    size = sum(file.size_bytes for file in result.manifest.files if file.num_records)
    print(f"{'topic':<20} {'records':>10}  offsets")
    for name, topic in result.manifest.topics.items():
        spans = " ".join(f"{topic.first[p]}:{topic.next[p]}" for p in sorted(topic.next, key=int))
        print(f"{name:<20} {topic.num_records:>10,}  {spans}")
    again = f", continued: {result.num_new:,} of them new" if result.is_resumed else ""
    print(
        f"{options.folder}: {counted(result.num_records, 'record')}, "
        f"{size / 1e6:,.1f} MB in Parquet files "
        f"({result.num_bytes / 1e6:,.1f} MB read in {result.seconds:.1f} s{again})"
    )


@command("list", "rlstreams record list", "rlstreams record list recordings", of=RECORD)
@argument("FOLDER", "a recording, or where some are; default: recordings", nargs=-1)
def list_(args: Namespace) -> int:
    """name recordings, with their runs, steps and times

    Exit status 1 if a recording lacks something.
    """
    return _list(args.folder, is_read=False)


@command("verify", "rlstreams record verify recordings/demo", of=RECORD)
@argument("FOLDER", "a recording, or where some are; default: recordings", nargs=-1)
def verify(args: Namespace) -> int:
    """read every byte of recordings

    Exit status 1 if something is missing or was changed.
    """
    return _list(args.folder, is_read=True)


def _list(names: list[str], *, is_read: bool) -> int:
    from rlstreams.streams.recording import Recording, RecordingError, reader
    from rlstreams.streams.run.places import check_place

    for name in names:
        if not Path(name).is_dir():
            check_place(name)
    found = [folder for name in names or ["recordings"] for folder in _folders(Path(name))]
    if not found:
        message = f"no recording in {', '.join(names) or 'recordings'}"
        print(f"{message}; make one: rlstreams record run RUN")
        return 1
    num_bad = 0
    print(f"{'recording':<28} {'run':<14} {'state':<9} {'records':>9}  steps   time (UTC)")
    for folder in found:
        try:
            with Recording(folder) as recording:
                line, problems = _line(recording), recording.problems
            if is_read:
                problems = reader.verify(folder)
        except RecordingError as err:
            line, problems = str(folder), [str(err)]
        num_bad += bool(problems)
        print(line + ("  every byte verified" if is_read and not problems else ""))
        print("".join(f"  {problem}\n" for problem in problems), end="")
    return 1 if num_bad else 0


def _folders(folder: Path) -> list[Path]:
    """Return the recordings in a folder, or the folder itself; none needs its manifest."""
    from rlstreams.streams.recording.manifest import holds_files
    from rlstreams.streams.run.recorded_log import is_recording

    def is_one(path: Path) -> bool:
        return is_recording(path) or holds_files(path)

    return [folder] if is_one(folder) else sorted(filter(is_one, folder.glob("*/")))


def _line(recording: Recording) -> str:
    from rlstreams.schemas.events import StepCompleted

    manifest, span = recording.manifest, recording.time_span
    steps = [record.event.step for record in recording.events(StepCompleted)]
    of = f"{min(steps)}-{max(steps)}" if steps else "none"
    time = f"{utc_text(span[0])} to {utc_text(span[1])[11:]}" if span else "- to "
    return (
        f"{recording.folder!s:<28} {manifest.run:<14} {manifest.state:<9} "
        f"{recording.num_records:>9,}  {of:<7} {time}"
    )


@command(
    "diff",
    "rlstreams record diff recordings/demo runs/demo-2",
    of=RECORD,
)
@argument("ONE", "a run: its folder or one TOML file, or a recording")
@argument("OTHER", "the same")
@option("--json", is_flag=True, help="one JSON object a line, for each kind of event")
def diff(args: Namespace) -> int:
    """compare two recordings or runs, record by record, field by field

    Pairs records by sample, step or version. Writers, times and offsets are ignored. Exit
    status 1 if something differs.
    """
    from rlstreams.debug.replay.diff import diff as compared
    from rlstreams.debug.replay.diff import lines

    with _opened(args.one) as one, _opened(args.other) as other:
        found = compared(one, other)
    if args.json:
        print_json(*found)
    else:
        print("\n".join(lines(found)))
    return 0 if found and all(summary.is_equal for summary in found) else 1


@contextmanager
def _opened(name: str) -> Iterator[Recording]:
    """Open a recording, or make one of a run's topics as they are now, in a temporary folder."""
    from rlstreams.debug.replay.record import RecordingOptions, record
    from rlstreams.streams.recording import Recording
    from rlstreams.streams.run.recorded_log import RecordedLog

    with (
        opened([name], []) as found,
        tempfile.TemporaryDirectory(prefix="rlstreams-diff-") as scratch,
    ):
        if isinstance(found.log, RecordedLog):
            yield found.log.recording
            return
        assert found.config is not None
        folder = Path(scratch) / found.config.run.id
        record(found.log.bus, found.config, RecordingOptions(folder=folder))
        with Recording(folder) as recording:
            yield recording
