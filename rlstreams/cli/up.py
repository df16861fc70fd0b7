"""`rlstreams up CONFIG...`: a broker and every role on this machine, supervised."""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import sys
from contextlib import redirect_stdout
from typing import TYPE_CHECKING

from rlstreams.cli.arguments import CONFIG, command

if TYPE_CHECKING:
    from rlstreams.up.live.figures import Figures
    from rlstreams.workers.config.run import RunConfig


# Hidden, and set by `rlstreams.run`: a pipe that closes when its process is gone.
@command("up", CONFIG, hidden=("--caller-fd",), settings={"--web": {"nargs": "?", "const": 9402}})
def run(args: argparse.Namespace) -> int:
    """run everything on this machine: broker and all roles, supervised

    Starts a broker, unless broker.bootstrap names one, and every role; restarts what dies.
    Ctrl-C drains and leaves a run that --resume continues. Exit status 0 if the run is
     complete, or drained as asked, and the audit finds no breach.

    --steps N  optimizer steps; short for --trainer.steps
    --resume   continue a run that has steps
    --web PORT  show the run in a browser, at this port of this machine; 0: a free one
    --no-live  plain lines instead of the live view
    --json     print each step, each evaluation and the end as a JSON object a line;
               everything else goes to stderr

    rlstreams up
    rlstreams up base.toml mine.toml --trainer.optimizer.lr=1e-5
    rlstreams up run.toml --resume --steps 120
    rlstreams up --web
    rlstreams up --json --no-live > figures.jsonl
    """
    from rlstreams.streams.log.errors import StreamsError
    from rlstreams.workers.config.load import check_secrets, load_with_origins

    overrides = list(args.overrides)
    if args.steps is not None:
        overrides += ["--trainer.steps", str(args.steps)]
    loaded = load_with_origins(args.config, overrides)
    config = loaded.config
    check_secrets(loaded)
    if args.caller_fd:
        _drain_when_closed(int(args.caller_fd))
    if not args.json:
        return _up(args, config, None)
    from rlstreams.up.live.figures import Figures

    figures = Figures(sys.stdout)
    with redirect_stdout(sys.stderr):
        try:
            return _up(args, config, figures)
        except StreamsError as err:
            problem = "\n".join([str(err), *getattr(err, "__notes__", ())])
            figures.end("failed", problem, type(err).__name__)
            raise


def _up(args: argparse.Namespace, config: RunConfig, figures: Figures | None) -> int:
    from rlstreams.up.supervisor.fault_hook import UpOptions
    from rlstreams.up.supervisor.up import up

    return up(
        UpOptions(
            config=config,
            command=shlex.join(["up", *args.config, *args.overrides]),
            is_resumed=args.resume,
            is_live=not args.no_live,
            steps_typed=args.steps or 0,
            web_port=args.web,
            figures=figures,
        )
    )


def _drain_when_closed(fd: int) -> None:
    """As Ctrl-C does; who read our output is gone as well, and up.log has it."""
    from rlstreams.workers.loop.runtime import Stop

    class Interrupt(Stop):
        def request(self, reason: str) -> None:
            del reason
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, 1)
            os.dup2(null, 2)
            os.kill(os.getpid(), signal.SIGINT)

    Interrupt().when_closed(fd)
