"""`rlstreams profile RUN_DIR|RECORDING --step N`: a torch trace of a step, executed again."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from rlstreams.cli.arguments import add_run, examples, opened, set_threads, whole


def add(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the command."""
    parser = subparsers.add_parser(
        "profile",
        help="profile a recorded step: a torch trace, and the kernels that take longest",
        description="Does the step again from the log, as rerun-step does, and once more under "
        "torch's profiler. The trace opens in https://ui.perfetto.dev. Writes nothing else.",
        epilog=examples("rlstreams profile runs/demo --step 7"),
    )
    add_run(parser, is_log=True)
    parser.add_argument("--step", type=whole(1), required=True, metavar="N", help="the step")
    parser.add_argument("--out", default="", metavar="FILE", help="the trace (profile-step-N.json)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Profile; 0."""
    from rlstreams.workers.config.load import from_json

    out = Path(args.out or f"profile-step-{args.step}.json")
    with opened(args.config, args.overrides) as found_run:
        config = found_run.config or from_json(json.dumps(found_run.log.configuration))
        set_threads(config.model.threads)
        from rlstreams.debug.rerun.profile import profile

        folders = [found_run.folder / "checkpoints"]
        found = profile(found_run.log.bus, config, args.step, checkpoints=folders, out=out)
    print(f"{'seconds':>9} {'calls':>7}  the kernels of step {args.step} that take longest")
    for name, calls, seconds in found.heaviest:
        print(f"{seconds:>9.4f} {calls:>7}  {name[:100]}")
    same = "the recorded weights" if found.is_equal else "OTHER weights than the recorded ones"
    print(f"the step took {found.seconds:.3f} s under the profiler and made {same}; trace: {out}")
    return 0
