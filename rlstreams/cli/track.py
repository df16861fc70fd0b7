"""`rlstreams track RUN`: a run's figures and samples for Weights & Biases and the like."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shlex
import signal
import sys
import threading
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


def run(args: argparse.Namespace) -> int:
    """Write all; 0 if no tracker lacks a row."""
    from rlstreams.debug.inspect.words import spelling
    from rlstreams.show.metrics.picks import SamplePicks
    from rlstreams.show.metrics.reading import read_rows
    from rlstreams.show.metrics.rows import MetricRows
    from rlstreams.show.track.tracker import Tracker
    from rlstreams.streams.log.errors import ConfigError, StreamsError

    config = configuration(args.config, args.overrides)
    if not config.track.used:
        raise ConfigError(
            "the section [track] names no tracker: set track.wandb.project, track.mlflow.uri, "
            "track.trackio.project or track.tensorboard.folder"
        )
    with suppress(OSError):
        os.nice(NICE)
    _alone(config)
    stop, tracker, has_held_out = threading.Event(), None, config.data.has_held_out
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    spelled = spelling("", config.model.path)
    while True:
        picks = SamplePicks(spelled, shlex.join(args.config), has_held_out=has_held_out)
        steps = config.trainer.steps if args.follow else 0
        view = MetricRows(has_held_out=has_held_out, step_target=steps, picks=picks)
        try:
            with opened_run(config, lambda _: None) as log:
                tracker = tracker or Tracker(config.track.used, _about(config, log, args), _say)
                read_rows(log.bus, tracker, view, follow=args.follow, stopped=stop.is_set)
        except StreamsError as err:
            if tracker is None or not args.follow:
                raise
            _say(f"the log cannot be read: {err}")
        if not args.follow or view.is_over or stop.wait(AGAIN_S):
            break
    tracker.close(stop.is_set)
    for name, num in tracker.missing.items():
        _say(f"{name}: lacks {num} rows or did not confirm them; they are in the log")
    return 1 if tracker.missing else 0


def _alone(config: RunConfig) -> None:
    """Two would end each other's processes; the lock goes with this one."""
    from rlstreams.streams.log.errors import ConfigError
    from rlstreams.streams.log.owner_lock import OwnedError, take

    Path(config.folder).mkdir(parents=True, exist_ok=True)
    try:
        take(Path(config.folder) / "track.lock")
    except OwnedError as err:
        raise ConfigError(f"{config.folder} is tracked by process {err.owner} already") from None


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
