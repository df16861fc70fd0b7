"""`rlstreams track RUN`: a run's figures and samples for Weights & Biases and the like."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shlex
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from rlstreams.cli.arguments import Commands, add_run, command, configuration, opened_run

if TYPE_CHECKING:
    from rlstreams.show.track.sinks import About
    from rlstreams.streams.run.run_log import RunLog
    from rlstreams.workers.config.run import RunConfig

NICE = 10  # the run goes first
AGAIN_S = 5.0  # until a log that could not be read is opened anew
PREDECESSOR_S = 45.0  # of an `up` that was killed: its tracker is about to end


def add(subparsers: Commands) -> None:
    """Add the command."""
    parser = command(
        subparsers,
        "track",
        run,
        """
        write steps, evaluations and samples to wandb, mlflow, trackio or tensorboard

        Reads the log, and writes what a tracker lacks: each row once, also after a kill, an outage
        or a resumed run. `up` does it by itself if the section [track] names a tracker. Exit status
        1: one lacks rows.

        --follow   go on until the run is over or SIGTERM

        rlstreams track runs/demo
        rlstreams track run.toml --follow --track.wandb.project=mine
        rlstreams track run.toml --track.mlflow.uri=http://localhost:5000
        """,
    )
    add_run(parser)
    # Set by `up`: a pipe that closes when its process is gone.
    parser.add_argument("--caller-fd", type=int, default=-1, help=argparse.SUPPRESS)


def run(args: argparse.Namespace) -> int:
    """Write all; 0 if no tracker lacks a row."""
    from rlstreams.streams.log.errors import ConfigError
    from rlstreams.streams.log.owner_lock import OwnedError, held

    config = configuration(args.config, args.overrides)
    if not config.track.used:
        raise ConfigError(
            "the section [track] names no tracker: set track.wandb.project, track.mlflow.uri, "
            "track.trackio.project or track.tensorboard.folder"
        )
    with suppress(OSError):
        os.nice(NICE)
    Path(config.folder).mkdir(parents=True, exist_ok=True)
    wait_s = PREDECESSOR_S if args.caller_fd >= 0 else 0.0
    try:
        # Two would end each other's processes.
        with held(Path(config.folder) / "track.lock", wait_s=wait_s):
            return _track(args, config)
    except OwnedError as err:
        raise ConfigError(f"{config.folder} is tracked by process {err.owner} already") from None


def _track(args: argparse.Namespace, config: RunConfig) -> int:
    from rlstreams.debug.inspect.words import spelling
    from rlstreams.show.metrics.picks import SamplePicks
    from rlstreams.show.metrics.reading import read_rows
    from rlstreams.show.metrics.rows import MetricRows
    from rlstreams.show.track.tracker import Tracker
    from rlstreams.streams.log.errors import StreamsError
    from rlstreams.workers.loop.runtime import Stop

    stop, tracker, has_held_out = Stop(), None, config.data.has_held_out
    stop.on_signals()
    if args.caller_fd >= 0:
        stop.when_closed(args.caller_fd)
    spelled = spelling("", config.model.path)
    while True:
        picks = SamplePicks(spelled, shlex.join(args.config), has_held_out=has_held_out)
        steps = config.trainer.steps if args.follow else 0
        view = MetricRows(has_held_out=has_held_out, step_target=steps, picks=picks)
        is_read = False
        try:
            with opened_run(config, lambda _: None) as log:
                tracker = tracker or Tracker(config.track.used, _about(config, log, args), _say)
                read_rows(
                    log.bus, tracker, view, follow=args.follow, stopped=lambda: stop.requested
                )
            is_read = not args.follow or view.is_over or stop.requested
        except StreamsError as err:
            if tracker is None or not args.follow:
                raise
            _say(f"the log cannot be read: {err}")
        if not args.follow or view.is_over or stop.wait(AGAIN_S):
            break
    tracker.close(lambda: stop.requested)
    for name, num in tracker.missing.items():
        _say(f"{name}: lacks {num} rows or did not confirm them; they are in the log")
    if not is_read:
        _say("the log was not read to its end")
    return 1 if tracker.missing or not is_read else 0


def _about(config: RunConfig, log: RunLog, args: argparse.Namespace) -> About:
    from rlstreams.show.track.sinks import About
    from rlstreams.workers.config.load import resolved_json

    cluster = hashlib.sha256(log.bus.cluster_id().encode()).hexdigest()[:8]
    return About(
        run=config.run.id,
        identity=f"{config.run.id}-{cluster}",
        folder=config.folder,
        config=json.loads(resolved_json(config)),
        look=f"rlstreams web {shlex.join(args.config)}",
    )


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
