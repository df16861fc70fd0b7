"""`rlstreams demo`: `up` with the packaged example, under a run id that is free."""

from __future__ import annotations

import itertools
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from rlstreams.cli.options import OVERRIDES, N, command, option
from rlstreams.cli.up import up_options

if TYPE_CHECKING:
    from rlstreams.up.supervisor.fault_hook import UpOptions

NAME = "demo"


@command(
    "demo",
    "rlstreams demo",
    "rlstreams demo --steps 20 --run.seed=1",
    "rlstreams demo --resume --steps 120",
    takes=OVERRIDES,
)
@option("--steps", type=N, help="optimizer steps; short for --trainer.steps")
@option("--no-live", is_flag=True, help="plain lines instead of the live view")
@option("--resume", is_flag=True, help="continue the run demo, or the one of --run.id")
def run(args: Namespace) -> int:
    """see a tiny model learn while processes are killed; needs no files

    Runs the packaged example in ./runs: a broker, every role, three kills, and a report. About
    two minutes on two cores. Takes --section.field VALUE as `up` does.
    """
    from rlstreams.up.supervisor.up import up

    return up(demo_options(args))


def demo_options(args: Namespace) -> UpOptions:
    """Return the options of `up`: for a new run, or with `--resume` for the existing one."""
    from rlstreams.workers.config.packaged import example

    if not any(word.startswith("--run.id") for word in args.config.overrides):
        name = NAME if args.resume else free_id(NAME, Path("runs"))
        args.config.overrides.append(f"--run.id={name}")
    return up_options(args, [example("demo.toml")], ["demo", *args.config.overrides])


def free_id(name: str, runs: Path) -> str:
    """Return `name`, or `name-2` and so on if there is such a run already."""
    ids = itertools.chain([name], (f"{name}-{n}" for n in itertools.count(2)))
    return next(found for found in ids if not (runs / found).exists())
