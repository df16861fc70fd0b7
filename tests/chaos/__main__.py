"""`python -m tests.chaos CONFIG`: kill and stop processes of a run at random, then audit it."""

from __future__ import annotations

import sys
from argparse import Namespace

from rlstreams.__main__ import console
from rlstreams.cli.options import CONFIG, SECONDS, SEED, N, command, option
from rlstreams.cli.up import up_options
from tests.chaos.plan import ChaosOptions
from tests.chaos.run import chaos

TARGETS = """rollout, logprob, trainer, prompts, broker, server (model servers; they are killed,
never suspended), records (damaged ones are written into every topic); default: all"""


@command(
    "chaos",
    "python -m tests.chaos run.toml --run.id=chaos --kills 12 --seed 1 --points",
    takes=CONFIG,
)
@option("--steps", type=N, help="optimizer steps; as configured, but at least --kills + 1")
@option("--kills", type=N, default=12, show_default=True, help="number of faults")
@option("--seed", type=SEED, default=0, show_default=True, help="seed of the plan")
@option("--roles", metavar="A,B", default="", help=f"targets: {TARGETS}")
@option("--every", type=SECONDS, default=5.0, show_default=True, help="mean, between two faults")
@option(
    "--max-stop",
    type=SECONDS,
    default=40.0,
    show_default=True,
    help="longest SIGSTOP, beyond the transaction timeout",
)
@option("--points", is_flag=True, help="also crash at named points in the code")
@option("--json", metavar="FILE", default="", help="write all figures there")
@option("--no-live", is_flag=True, help="plain lines instead of the live view")
def program(args: Namespace) -> int:
    """run everything as `up` does while killing processes at random, then audit

    Starts the run as `up` does, injects faults into its processes and its embedded broker by a
    plan derived from --seed, lets it finish, and audits it: every sample accounted for. Exit
    status 1 on any breach or hang, or if not all faults could be injected.
    """
    from rlstreams.workers.config.load import load

    words = ["up", *args.config.names, *args.config.overrides]
    args.config.overrides.append("--demo.kills=[]")  # the plan kills enough
    args.steps = args.steps or max(args.kills + 1, load(*args.config).trainer.steps)
    args.resume = False
    return chaos(
        up_options(args, args.config.names, words),
        ChaosOptions(
            num_faults=args.kills,
            seed=args.seed,
            roles=[word for word in args.roles.split(",") if word],
            every_s=args.every,
            max_stop_s=args.max_stop,
            has_points=args.points,
            json_file=args.json,
        ),
    )


if __name__ == "__main__":
    sys.exit(console(program))
