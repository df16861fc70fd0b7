"""`rlstreams rerun-step N RUN_DIR|RECORDING`: a recorded step again, as it was, or changed."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rlstreams.cli.arguments import add_run, examples, set_threads, whole

if TYPE_CHECKING:
    from rlstreams.debug.rerun.rerun import Rerun
    from rlstreams.streams.log.bus import Bus
    from rlstreams.workers.config.run import RunConfig


def add(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the command."""
    parser = subparsers.add_parser(
        "rerun-step",
        help="re-execute a recorded step and compare it; with --set, also a changed one",
        description="Loads the newest checkpoint before the step, redoes the steps in between, "
        "then the step itself. Writes nothing but a plot of a changed re-run. Exit status 1 if "
        "anything differs.",
        epilog=examples(
            "rlstreams rerun-step 7 recordings/demo",
            "rlstreams rerun-step 7 runs/demo --set trainer.loss.clip_high=0.01",
        ),
    )
    parser.add_argument("step", type=whole(1), metavar="N", help="the step")
    add_run(parser, is_log=True)
    parser.add_argument(
        "--set",
        dest="settings",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="re-run it a second time with this changed: trainer.loss.*, trainer.optimizer.*, "
        "trainer.micro_batch_tokens, trainer.control; repeatable",
    )
    parser.add_argument(
        "--checkpoints", action="append", default=[], metavar="DIR", help="also look here"
    )
    parser.add_argument("--model", default="", metavar="DIR", help="where the model folder is now")
    parser.add_argument(
        "--plot", default="", metavar="FILE", help="of a changed re-run (rerun-step-N.png)"
    )
    parser.add_argument("--json", action="store_true", help="the findings as one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Re-run; 0 if everything is equal to what was recorded."""
    from rlstreams.debug.replay.change import changed_config
    from rlstreams.runs.places import check_checkpoints

    for name in args.checkpoints:
        check_checkpoints(name, "--checkpoints")
    with _source(args) as (bus, found_config, folder):
        path = args.model or found_config.model.path
        config = replace(found_config, model=replace(found_config.model, path=path))
        set_threads(config.model.threads)
        from rlstreams.debug.rerun.rerun import rerun

        extra = [Path(name) for name in args.checkpoints]
        found = rerun(
            bus,
            config,
            args.step,
            checkpoints=[folder / "checkpoints", *extra],
            weights=[folder / "weights"],
            change=partial(changed_config, settings=args.settings) if args.settings else None,
        )
    return _tell(args, found)


@contextmanager
def _source(args: argparse.Namespace) -> Iterator[tuple[Bus, RunConfig, Path]]:
    """The log, a configuration, and the folder that may hold checkpoints and weights."""
    from rlstreams.debug.replay.target import recorded_config
    from rlstreams.runs.attach import attached
    from rlstreams.runs.configuration import configuration
    from rlstreams.runs.places import check_place
    from rlstreams.streams.recording import Recording
    from rlstreams.streams.recording.bus import RecordingBus
    from rlstreams.streams.run.recorded_log import is_recording

    check_place(args.config[0])
    first = Path(args.config[0])
    if is_recording(first):
        with Recording(first) as recording:
            for problem in recording.problems:
                print(f"warning: {problem}", file=sys.stderr)
            yield RecordingBus(recording), recorded_config(recording), first
        return
    config = configuration(args.config, args.overrides)
    with attached(config) as bus:
        yield bus, config, Path(config.folder)


def _tell(args: argparse.Namespace, found: Rerun) -> int:
    from rlstreams.debug.replay.rerun_text import as_json, lines, save_plot
    from rlstreams.streams.log.plain_json import plain_json

    if args.json:
        print(plain_json(as_json(found)))
    else:
        print("\n".join(lines(found)))
    if found.change is not None:
        path = Path(args.plot or f"rerun-step-{found.step}.png")
        save_plot(found, path)
        if not args.json:
            print(f"plot: {path}")
    return 0 if found.is_equal else 1
