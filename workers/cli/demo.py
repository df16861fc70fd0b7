"""`rlstreams demo`: `up` with the packaged example, under a run id that is free."""

from __future__ import annotations

import argparse
import itertools
import shlex
from pathlib import Path

from workers.cli.arguments import add_no_live, examples


def add(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the command."""
    parser = subparsers.add_parser(
        "demo",
        help="see a tiny model learn while processes are killed; needs no files",
        description="Runs the packaged example in ./runs: a broker, every role, three kills, and "
        "a report. About two minutes on two cores. Takes --section.field VALUE as `up` does.",
        epilog=examples(
            "rlstreams demo",
            "rlstreams demo --steps 20 --run.seed=1",
        ),
    )
    parser.add_argument(
        "--steps", type=int, metavar="N", help="optimizer steps; short for --trainer.steps"
    )
    add_no_live(parser)
    parser.set_defaults(run=run, config=None)


def run(args: argparse.Namespace) -> int:
    """Run it; 0 only if the run is complete and the audit finds nothing."""
    from workers.config_load import load
    from workers.packaged import example
    from workers.supervisor.up import Asked, up

    file, overrides = str(example("demo.toml")), list(args.overrides)
    if args.steps is not None:
        overrides += ["--trainer.steps", str(args.steps)]
    if not any(word.startswith("--run.id") for word in overrides):
        overrides.append(f"--run.id={free_id('demo', Path('runs'))}")
    words = shlex.join(
        [file, *(word for word in overrides if word not in ("--trainer.steps", str(args.steps)))]
    )
    config = load([file], overrides)
    return up(Asked(config=config, config_words=words, is_resumed=False, is_live=not args.no_live))


def free_id(name: str, runs: Path) -> str:
    """`name`, or `name-2` and so on if there is such a run already."""
    ids = itertools.chain([name], (f"{name}-{n}" for n in itertools.count(2)))
    return next(found for found in ids if not (runs / found).exists())
