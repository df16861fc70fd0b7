"""`rlstreams up CONFIG...`: a broker and every role on this machine, supervised."""

from __future__ import annotations

import os
import shlex
import signal
import sys
from argparse import Namespace
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rlstreams.cli.options import CONFIG, PORT, N, command, hidden, option
from rlstreams.streams.log.errors import StreamsError
from rlstreams.streams.process.owner import when_gone

if TYPE_CHECKING:
    from rlstreams.up.supervisor.fault_hook import UpOptions


# Hidden, and set by `rlstreams.run`: standard input closes when its process is gone.
@command(
    "up",
    "rlstreams up",
    "rlstreams up base.toml mine.toml --trainer.optimizer.lr=1e-5",
    "rlstreams up run.toml --resume --steps 120",
    "rlstreams up --web",
    "rlstreams up --json --no-live > figures.jsonl",
    takes=CONFIG,
)
@hidden("--owner")
@option("--steps", type=N, help="optimizer steps; short for --trainer.steps")
@option("--resume", is_flag=True, help="continue a run that has steps")
@option(
    "--web",
    type=PORT,
    is_flag=False,
    flag_value=9402,
    help="show the run in a browser, at this port of this machine (9402 if none is named; 0: a "
    "free one)",
)
@option("--no-live", is_flag=True, help="plain lines instead of the live view")
@option(
    "--json",
    is_flag=True,
    help="print each step, each evaluation and the end as a JSON object a line; "
    "everything else goes to stderr",
)
def run(args: Namespace) -> int:
    """run everything on this machine: broker and all roles, supervised

    Starts a broker, unless broker.bootstrap names one, and every role; restarts what dies.
    Ctrl-C drains and leaves a run that --resume continues. Exit status 0 if the run is
    complete, or drained as asked, and the audit finds no breach.
    """
    from rlstreams.up.live.figures import Figures
    from rlstreams.up.supervisor.up import up

    options = up_options(
        args, args.config.names, ["up", *args.config.names, *args.config.overrides]
    )
    if args.owner:
        when_gone(_drain)
    if not args.json:
        return up(options)
    figures = Figures(sys.stdout)
    with redirect_stdout(sys.stderr):
        try:
            return up(replace(options, figures=figures))
        except StreamsError as err:
            problem = "\n".join([str(err), *getattr(err, "__notes__", ())])
            figures.end("failed", problem, type(err).__name__)
            raise


def up_options(args: Namespace, files: Sequence[str | Path], words: Sequence[str]) -> UpOptions:
    """Return the options of `up` for files of a configuration.

    Args:
        words: a command line that starts the run again, without `--steps`.
    """
    from rlstreams.up.supervisor.fault_hook import UpOptions
    from rlstreams.workers.config.load import check_secrets, load_with_origins

    steps = [] if args.steps is None else ["--trainer.steps", str(args.steps)]
    loaded = load_with_origins(files, [*args.config.overrides, *steps])
    check_secrets(loaded)
    return UpOptions(
        config=loaded.config,
        command=shlex.join(words),
        is_resumed=args.resume,
        is_live=not args.no_live,
        steps_typed=args.steps or 0,
        web_port=getattr(args, "web", None),
    )


def _drain() -> None:
    """Drain as Ctrl-C does; output goes to up.log alone, as its reader has ended too."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    os.kill(os.getpid(), signal.SIGINT)
