"""`rlstreams metrics ACTION`: the figures of a run for other programs, read from its log."""

from __future__ import annotations

import hashlib
import math
import shlex
import sys
import time
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from rlstreams.cli.named import configuration, opened_run
from rlstreams.cli.options import PORT, RUN, CommandGroup, command, hidden, one_of, option
from rlstreams.streams.log.errors import BrokerError, ConfigError, StreamsError
from rlstreams.streams.log.text import counted
from rlstreams.words.spelling import spelling
from rlstreams.workers.loop.runtime import Stop

if TYPE_CHECKING:
    from rlstreams.show.metrics.rows import Sink
    from rlstreams.show.track.sinks import About
    from rlstreams.streams.log.bus import Bus
    from rlstreams.streams.run.run_log import RunLog
    from rlstreams.workers.config.run import RunConfig

STDOUT = "-"
PREDECESSOR_S = 45.0  # longest wait for the tracker of a killed `up`, which is about to end

METRICS = CommandGroup(
    "metrics",
    "figures of a run for other programs: rows, Prometheus, trackers, health",
    "Reads the log and touches nothing: while the run goes on, afterwards, or again from the "
    "beginning, each time with the same figures.",
    was="rows",
)


@command(
    "rows",
    "rlstreams metrics rows runs/demo --out steps.csv --format csv",
    "rlstreams metrics rows runs/demo --follow",
    of=METRICS,
    takes=RUN,
)
@option("--follow", is_flag=True, help="go on until the run is over or Ctrl-C")
@option("--out", metavar="FILE", help="- is standard output", default=STDOUT, show_default=True)
@option(
    "--format",
    type=one_of("jsonl", "csv"),
    help="what is written",
    default="jsonl",
    show_default=True,
)
def rows(args: Namespace) -> int:
    """a row for each step and each evaluation, as JSON lines or CSV"""
    if args.format == "csv" and args.follow:
        raise ConfigError("a CSV table is written when its last row is known: follow with jsonl")
    from rlstreams.show.metrics.rows import MetricRows, read_rows

    config = configuration(*args.config)
    with opened_run(config) as log, _sink(args) as sink, suppress(KeyboardInterrupt):
        view = MetricRows(has_held_out=config.data.has_held_out, has_agents=bool(config.agent))
        num_rows = read_rows(log.bus, sink, view, follow=args.follow)
        where = "" if args.out == STDOUT else f" in {args.out}"
        print(f"{counted(num_rows, 'row')}{where}", file=sys.stderr)
    return 0


@command(
    "prometheus",
    "rlstreams metrics prometheus runs/demo --port 9400",
    of=METRICS,
    takes=RUN,
)
@option("--port", type=PORT, help="to answer scrapes at", default=9400, show_default=True)
def prometheus(args: Namespace) -> int:
    """answer scrapes with the present state, until Ctrl-C"""
    config = configuration(*args.config)
    with opened_run(config) as log:
        _serve(log.bus, config.run.id, args.port)
    return 0


@contextmanager
def _sink(args: Namespace) -> Iterator[Sink]:
    """Open the sink of rows, and close it at the end in any case."""
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
    from rlstreams.streams.log.bus import existing
    from rlstreams.streams.log.topics import CALLS
    from rlstreams.streams.views.feed import WATCHED, Feed, Views

    views = Views()
    topics = (*WATCHED, *existing(bus, (CALLS,)))
    feed, latest = Feed(bus, views, topics), views.state  # a frozen snapshot, for another thread
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


@command(
    "track",
    "rlstreams metrics track runs/demo",
    "rlstreams metrics track runs/demo --track.tensorboard.folder=board",
    "rlstreams metrics track run.toml --follow --track.wandb.project=mine",
    "rlstreams metrics track run.toml --track.mlflow.uri=http://localhost:5000",
    of=METRICS,
    takes=RUN,
)
@hidden("--owner", "--only")
@option("--follow", is_flag=True, help="go on until the run is over or SIGTERM")
def track(args: Namespace) -> int:
    """write steps, evaluations and samples to wandb, mlflow, trackio or tensorboard

    Reads the log, and writes what a tracker lacks: each row once, also after a kill, an outage
    or a resumed run. `up` does it by itself if the section [track] names a tracker. Exit status
    1: one lacks rows.
    """
    from rlstreams.show.track.tracker import TRIES, keep
    from rlstreams.streams.log.owner_lock import OwnedError, held

    config = configuration(*args.config, may_set="track")
    if not config.track.used:
        raise ConfigError(
            f"the section [track] names no tracker: set {' or '.join(config.track.places.values())}"
        )
    stop = Stop()
    stop.on_signals()
    if args.owner:
        stop.when_gone(args.owner)
    if args.only:
        return _write(args, config, stop)
    folder = Path(config.folder)
    folder.mkdir(parents=True, exist_ok=True)
    words = [sys.executable, "-m", "rlstreams", "metrics", "track"]
    words += [*args.config.names, *args.config.overrides]
    words += [*(["--follow"] if args.follow else []), "--only"]
    commands = {name: [*words, name] for name in config.track.used}
    wait_s = PREDECESSOR_S if args.owner else 0.0
    tries = math.inf if args.follow else TRIES
    try:
        # Two trackers would end each other's processes.
        with held(folder / "track.lock", wait_s=wait_s):
            lacking = keep(commands, _say, lambda: stop.requested, tries=tries)
    except OwnedError as err:
        raise ConfigError(f"{config.folder} is tracked by process {err.owner} already") from None
    for name in lacking:
        _say(f"{name}: lacks rows, or did not confirm them; they are in the log")
    return 1 if lacking else 0


def _write(args: Namespace, config: RunConfig, stop: Stop) -> int:
    """Write the rows that one tracker lacks; 0 once it has all."""
    from rlstreams.show.metrics.rows import MetricRows, SamplePicks, read_rows
    from rlstreams.show.track.sinks import SINKS
    from rlstreams.show.track.tracker import Timely

    has_held_out, spelled = config.data.has_held_out, spelling("", config.model.path)
    picks = SamplePicks(spelled, shlex.join(args.config.names), has_held_out=has_held_out)
    steps = config.trainer.steps if args.follow else 0
    view = MetricRows(
        has_held_out=has_held_out, step_target=steps, picks=picks, has_agents=bool(config.agent)
    )
    with opened_run(config, (lambda _: None) if args.follow else None) as log:
        about, settings = _about(config, log, args), config.track.used[args.only]
        try:
            sink = Timely(lambda: SINKS[args.only](settings, about))
            num_rows = read_rows(
                log.bus, sink, view, follow=args.follow, stopped=lambda: stop.requested
            )
            sink.close()
            if not args.follow:
                _say(f"{args.only}: has all of run {config.run.id}, {counted(num_rows, 'row')}")
        except StreamsError:
            raise
        except Exception as err:  # noqa: BLE001 - a tracker library's: reported, and tried again
            _say(f"{args.only}: {type(err).__name__}: {' '.join(str(err).split())[:300]}")
            return 1
    return 0 if not args.follow or view.is_over or stop.requested else 1


def _about(config: RunConfig, log: RunLog, args: Namespace) -> About:
    from rlstreams.show.track.sinks import About
    from rlstreams.workers.config.load import tree_of

    cluster = hashlib.sha256(log.bus.cluster_id().encode()).hexdigest()[:8]
    return About(
        run=config.run.id,
        identity=f"{config.run.id}-{cluster}",
        folder=config.folder,
        config=tree_of(config),
        look=f"rlstreams web {shlex.join(args.config.names)}",
    )


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@command(
    "health",
    "rlstreams metrics health runs/demo",
    "rlstreams metrics health run.toml --host 0.0.0.0 --port 9401 --deadlines.stall_s=600",
    of=METRICS,
    takes=RUN,
)
@option("--host", metavar="ADDRESS", help="to listen on", default="127.0.0.1", show_default=True)
@option("--port", type=PORT, help="to listen on; 0: a free one", default=9401, show_default=True)
def health(args: Namespace) -> int:
    """serve a run's health as JSON (extra `monitor`)

    Reads the small topics (steps, versions, pulls, dead letters, workers' reports; no prompts,
    no trajectories) and writes nothing. /health is 200, or 503 with what is wrong. Until
    Ctrl-C.
    """
    from rlstreams.show.health.app import serve
    from rlstreams.show.health.health import SMALL
    from rlstreams.workers.bootstrap.parts import bootstrap_of

    config = configuration(*args.config)

    def say(address: str) -> None:
        print(f"monitor of run {config.run.id}: {address}/health", file=sys.stderr, flush=True)

    with opened_run(config) as log:
        ends = {at: end for topic in SMALL for at, end in log.bus.ends(topic.name).items()}
        serve(
            config,
            bootstrap_of(config),
            ends,
            log.bus.schemas(),
            host=args.host,
            port=args.port,
            say=say,
        )
    return 0
