"""`rlstreams diff ONE OTHER`: recordings or runs, record by record and field by field."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rlstreams.cli.arguments import command, opened, print_json

if TYPE_CHECKING:
    from rlstreams.streams.recording import Recording


@command("diff")
def run(args: argparse.Namespace) -> int:
    """compare two recordings or runs, record by record, field by field

    Pairs records by sample, step or version. Writers, times and offsets are ignored. Exit
    status 1 if something differs.

    ONE     a run: its folder or one TOML file, or a recording
    OTHER   the same
    --json  one JSON object a line, for each kind of event

    rlstreams diff recordings/demo runs/demo-2
    """
    from rlstreams.debug.replay.diff import diff, lines

    with _opened(args.one) as one, _opened(args.other) as other:
        found = diff(one, other)
    if args.json:
        print_json(*found)
    else:
        print("\n".join(lines(found)))
    return 0 if found and all(summary.is_equal for summary in found) else 1


@contextmanager
def _opened(name: str) -> Iterator[Recording]:
    """A recording, or one made in a temporary folder of what a run's topics hold now."""
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
