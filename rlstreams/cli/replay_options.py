"""Options of `rlstreams replay`, whatever it plays into."""

from __future__ import annotations

import argparse
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rlstreams.debug.replay.filters import RecordFilter
    from rlstreams.debug.replay.target import Target
    from rlstreams.streams.recording import Recording


def fresh_target(args: argparse.Namespace, recording: Recording) -> AbstractContextManager[Target]:
    """The fresh run that the options name, as a context."""
    from rlstreams.debug.replay.target import fresh_run, replay_config

    config = replay_config(recording, run_id=args.run_id, folder=args.dir, bootstrap=args.bootstrap)
    return fresh_run(config, schemas=[*recording.schemas.values()], keep=args.keep)


def record_filter(args: argparse.Namespace) -> RecordFilter:
    """What the options choose."""
    from rlstreams.cli.ranges import range_of, selection_of
    from rlstreams.debug.replay.filters import RecordFilter

    return RecordFilter(
        selection=selection_of(args),
        rewards=range_of(args.rewards, "--rewards", float),
        staleness=range_of(args.staleness, "--staleness"),
        dead_letters=args.dead_letters,
        begin=args.begin,
        end=args.end,
    )
