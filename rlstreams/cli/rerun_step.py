"""`rlstreams rerun-step N RUN_DIR|RECORDING`: a recorded step again, as it was, or changed."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rlstreams.cli.arguments import Commands, add_run, command, opened, set_threads, whole

if TYPE_CHECKING:
    from rlstreams.debug.rerun.rerun import Rerun


def add(subparsers: Commands) -> None:
    """Register the command."""
    parser = command(
        subparsers,
        "rerun-step",
        run,
        """
        re-execute a recorded step and compare it; with --set, also a changed one

        Loads the newest checkpoint before the step, redoes the steps in between, then the step
        itself. Writes nothing. Exit status 1 if anything differs.

        --set NAME=VALUE   re-run it a second time with this changed: trainer.loss.*,
                           trainer.optimizer.*, trainer.micro_batch_tokens, trainer.control;
                           repeatable
        --checkpoints DIR  also look here
        --model DIR        where the model folder is now
        --json             the findings as one JSON object

        rlstreams rerun-step 7 recordings/demo
        rlstreams rerun-step 7 runs/demo --set trainer.loss.clip_high=0.01
        """,
        set_={"dest": "settings", "action": "append", "default": []},
        checkpoints_={"action": "append", "default": []},
    )
    parser.add_argument("step", type=whole(1), metavar="N", help="the step")
    add_run(parser, is_log=True)


def run(args: argparse.Namespace) -> int:
    """Re-run; 0 if everything is equal to what was recorded."""
    import json

    from rlstreams.debug.rerun.change import changed_config
    from rlstreams.streams.run.places import check_checkpoints
    from rlstreams.workers.config.load import from_json

    for name in args.checkpoints:
        check_checkpoints(name, "--checkpoints")
    with opened(args.config, args.overrides) as found_run:
        for problem in found_run.log.problems:
            print(f"warning: {problem}", file=sys.stderr)
        found_config = found_run.config or from_json(json.dumps(found_run.log.configuration))
        path = args.model or found_config.model.path
        config = replace(found_config, model=replace(found_config.model, path=path))
        set_threads(config.model.threads)
        from rlstreams.debug.rerun.rerun import rerun

        extra = [Path(name) for name in args.checkpoints]
        found = rerun(
            found_run.log.bus,
            config,
            args.step,
            checkpoints=[found_run.folder / "checkpoints", *extra],
            weights=[found_run.folder / "weights"],
            change=partial(changed_config, settings=args.settings) if args.settings else None,
        )
    return _tell(args, found)


def _tell(args: argparse.Namespace, found: Rerun) -> int:
    from rlstreams.debug.rerun.text import as_json, lines
    from rlstreams.streams.log.text import plain_json

    print(plain_json(as_json(found)) if args.json else "\n".join(lines(found)))
    return 0 if found.is_equal else 1
