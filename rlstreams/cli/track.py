"""`rlstreams track RUN`: a run's figures and samples for Weights & Biases and the like."""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import shlex
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from rlstreams.cli.arguments import RUN, command, configuration, opened_run
from rlstreams.debug.inspect.words import spelling
from rlstreams.streams.log.errors import ConfigError, StreamsError
from rlstreams.workers.loop.runtime import Stop

if TYPE_CHECKING:
    from rlstreams.show.track.sinks import About
    from rlstreams.streams.run.run_log import RunLog
    from rlstreams.workers.config.run import RunConfig

NICE = 10  # the run goes first
PREDECESSOR_S = 45.0  # of an `up` that was killed: its tracker is about to end


# Hidden: `up` says that standard input closes when it is gone; this command starts itself again for
# each tracker.
@command("track", RUN, hidden=("--owner", "--only"))
def run(args: argparse.Namespace) -> int:
    """write steps, evaluations and samples to wandb, mlflow, trackio or tensorboard

    Reads the log, and writes what a tracker lacks: each row once, also after a kill, an outage
    or a resumed run. `up` does it by itself if the section [track] names a tracker. Exit status
    1: one lacks rows.

    --follow   go on until the run is over or SIGTERM

    rlstreams track runs/demo
    rlstreams track run.toml --follow --track.wandb.project=mine
    rlstreams track run.toml --track.mlflow.uri=http://localhost:5000
    """
    from rlstreams.show.track.tracker import TRIES, keep
    from rlstreams.streams.log.owner_lock import OwnedError, held

    config = configuration(args.config, args.overrides)
    if not config.track.used:
        raise ConfigError(
            "the section [track] names no tracker: set track.wandb.project, track.mlflow.uri, "
            "track.trackio.project or track.tensorboard.folder"
        )
    stop = Stop()
    stop.on_signals()
    if args.owner:
        stop.when_gone(args.owner)
    if args.only:
        return _write(args, config, stop)
    with suppress(OSError):
        os.nice(NICE)
    folder = Path(config.folder)
    folder.mkdir(parents=True, exist_ok=True)
    words = [sys.executable, "-m", "rlstreams", "track", *args.config, *args.overrides]
    words += [*(["--follow"] if args.follow else []), "--only"]
    commands = {name: [*words, name] for name in config.track.used}
    wait_s = PREDECESSOR_S if args.owner else 0.0
    tries = math.inf if args.follow else TRIES
    try:
        # Two would end each other's processes.
        with held(folder / "track.lock", wait_s=wait_s):
            lacking = keep(commands, _say, lambda: stop.requested, tries=tries)
    except OwnedError as err:
        raise ConfigError(f"{config.folder} is tracked by process {err.owner} already") from None
    for name in lacking:
        _say(f"{name}: lacks rows, or did not confirm them; they are in the log")
    return 1 if lacking else 0


def _write(args: argparse.Namespace, config: RunConfig, stop: Stop) -> int:
    """What one tracker lacks; 0 once it has all."""
    from rlstreams.show.metrics.rows import MetricRows, SamplePicks, read_rows
    from rlstreams.show.track.sinks import SINKS
    from rlstreams.show.track.tracker import Timely

    has_held_out, spelled = config.data.has_held_out, spelling("", config.model.path)
    picks = SamplePicks(spelled, shlex.join(args.config), has_held_out=has_held_out)
    steps = config.trainer.steps if args.follow else 0
    view = MetricRows(has_held_out=has_held_out, step_target=steps, picks=picks)
    with opened_run(config, lambda _: None) as log:
        about, settings = _about(config, log, args), config.track.used[args.only]
        try:
            sink = Timely(lambda: SINKS[args.only](settings, about))
            read_rows(log.bus, sink, view, follow=args.follow, stopped=lambda: stop.requested)
            sink.close()
        except StreamsError:
            raise
        except Exception as err:  # noqa: BLE001 - a library's: told, and tried again
            _say(f"{args.only}: {type(err).__name__}: {' '.join(str(err).split())[:300]}")
            return 1
    return 0 if not args.follow or view.is_over or stop.requested else 1


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
