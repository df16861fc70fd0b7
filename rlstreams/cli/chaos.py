"""`rlstreams chaos CONFIG...`: kill and stop processes of a run at random, then audit it."""

from __future__ import annotations

import argparse

from rlstreams.cli.arguments import CONFIG, command
from rlstreams.cli.up import up_options


@command("chaos", CONFIG, defaults={"resume": False})
def run(args: argparse.Namespace) -> int:
    """run everything as `up` does while killing processes at random, then audit

    Starts the run as `up` does, injects faults into its processes and its embedded broker by a
    plan derived from --seed, lets it finish, and audits it: every sample accounted for. Exit
    status 1 on any breach or hang, or if not all faults could be injected.

    --steps N             optimizer steps; default: as configured, but at least --kills + 1
    --kills N             number of faults [12]
    --seed SEED           seed of the plan [0]
    --roles A,B           targets: rollout, logprob, trainer, prompts, broker, server (the
                          model servers that rollout workers start; they are killed, never
                          suspended), records (damaged ones are written into every topic);
                          default: all
    --every SECONDS       mean time between two faults [5]
    --max-stop SECONDS    longest SIGSTOP, beyond the transaction timeout [40]
    --points              also crash at named points in the code
    --json FILE           write all figures there
    --no-live             plain lines instead of the live view

    rlstreams chaos run.toml --run.id=chaos --kills 12 --seed 1 --points
    """
    from rlstreams.start.chaos.plan import ChaosOptions
    from rlstreams.start.chaos.run import chaos
    from rlstreams.workers.config.load import load

    words = ["up", *args.config, *args.overrides]
    args.overrides += ["--demo.kills=[]"]  # the plan kills enough
    args.steps = args.steps or max(args.kills + 1, load(args.config, args.overrides).trainer.steps)
    return chaos(
        up_options(args, args.config, words),
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
