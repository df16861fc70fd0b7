"""`rlstreams rerun-step N RUN_DIR|RECORDING`: a recorded step again, as it was, or changed."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

from rlstreams.cli.arguments import LOG, command, opened, print_json, set_threads


@command("rerun-step", LOG)
def run(args: argparse.Namespace) -> int:
    """re-execute a recorded step and compare it; with --set, also a changed one

    Loads the newest checkpoint before the step, redoes the steps in between, then the step
    itself. Writes nothing. Exit status 1 if anything differs.

    N                  the step
    --set NAME=VALUE...  re-run it a second time with this changed: trainer.loss.*,
                       trainer.optimizer.*, trainer.micro_batch_tokens,
                       trainer.minibatches, trainer.batch_epochs, trainer.control
    --json             print what was compared as one JSON object
    --checkpoints DIR...  also look here
    --model DIR        where the model folder is now
    --profile FILE     instead, do it twice and write a torch trace of the second time, for
                       https://ui.perfetto.dev; print the kernels that take longest

    rlstreams rerun-step 7 recordings/demo
    rlstreams rerun-step 7 runs/demo --set trainer.loss.clip_high=0.01
    rlstreams rerun-step 7 runs/demo --profile step-7.json
    """
    import json

    from rlstreams.streams.run.places import CHECKPOINTS, check_folder_of
    from rlstreams.workers.config.load import from_json

    for name in args.checkpoints:
        check_folder_of(CHECKPOINTS, name, "--checkpoints")
    with opened(args.config, args.overrides) as found_run:
        for problem in found_run.log.problems:
            print(f"warning: {problem}", file=sys.stderr)
        found_config = found_run.config or from_json(json.dumps(found_run.log.configuration))
        path = args.model or found_config.model.path
        config = replace(found_config, model=replace(found_config.model, path=path))
        set_threads(config.model.threads)
        from rlstreams.debug.rerun.rerun import changed_config, lines, profile, rerun

        extra = [Path(name) for name in args.checkpoints]
        folders = [found_run.folder / "checkpoints", *extra]
        if args.profile:
            out = Path(args.profile)
            traced = profile(found_run.log.bus, config, args.n, checkpoints=folders, out=out)
            print("\n".join(traced.lines(args.n, out)))
            return 0
        found = rerun(
            found_run.log.bus,
            config,
            args.n,
            checkpoints=folders,
            weights=[found_run.folder / "weights"],
            change=partial(changed_config, settings=args.set) if args.set else None,
        )
    if args.json:
        names = "step is_equal started_from num_redone findings environment change"
        print_json({name: getattr(found, name) for name in names.split()})
    else:
        print("\n".join(lines(found)))
    return 0 if found.is_equal else 1
