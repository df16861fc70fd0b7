"""`rlstreams chaos CONFIG...`: kill and stop processes of a run at random, then audit it."""

from __future__ import annotations

import argparse
import shlex

from rlstreams.cli.arguments import Commands, add_config, add_no_live, command, options, real, whole


def add(subparsers: Commands) -> None:
    """Register the command."""
    parser = command(
        subparsers,
        "chaos",
        run,
        """
        run everything as `up` does while killing processes at random, then audit

        Starts the run as `up` does, injects faults into its processes and its embedded broker by a
        plan derived from --seed, lets it finish, and audits it: every sample accounted for. Exit
        status 1 on any breach or hang, or if not all faults could be injected.

        --steps N    optimizer steps; default: as configured, but at least --kills + 1
        --json FILE  write all figures there

        rlstreams chaos run.toml --run.id=chaos --kills 12 --seed 1 --points
        rlstreams chaos run.toml --run.id=points --each-point commit,offsets
        """,
        steps_={"type": whole(1)},
    )
    add_config(parser)
    _add_faults(parser)
    add_no_live(parser)


def _add_faults(parser: argparse.ArgumentParser) -> None:
    """Who is struck, how and when."""
    options(
        parser,
        """
        --kills N             number of faults (%(default)s)
        --seed N              seed of the plan (%(default)s)
        --roles A,B           targets: rollout, logprob, trainer, prompts, broker, server (the
                              model servers that rollout workers start; they are killed, never
                              suspended), records (damaged ones are written into every topic);
                              default: all
        --every SECONDS       mean time between two faults (%(default)g)
        --max-stop SECONDS    longest SIGSTOP (%(default)g: beyond the transaction timeout)
        --points              also crash at named points in the code
        --each-point all|A,B  instead of N random faults: every role crashes once at each named
                              point that it reaches, or at those whose names begin like this, e.g.
                              commit,offsets
        """,
        kills_={"type": whole(1), "default": 12},
        seed_={"type": int, "default": 0},
        every_={"type": real(0.0), "default": 5.0},
        max_stop_={"type": real(0.0), "default": 40.0},
    )


def run(args: argparse.Namespace) -> int:
    """Run it; 0 only if all faults happened and nothing broke."""
    from rlstreams.start.chaos.run import ChaosOptions, chaos
    from rlstreams.up.supervisor.fault_hook import UpOptions
    from rlstreams.workers.config.load import load

    overrides = [*args.overrides, "--demo.kills=[]"]  # the plan kills enough
    steps = args.steps or max(args.kills + 1, load(args.config, overrides).trainer.steps)
    config = load(args.config, [*overrides, f"--trainer.steps={steps}"])
    command = shlex.join(["up", *args.config, *args.overrides])
    return chaos(
        UpOptions(
            config=config,
            command=command,
            is_resumed=False,
            is_live=not args.no_live,
            steps_typed=steps,
        ),
        ChaosOptions(
            num_faults=args.kills,
            seed=args.seed,
            roles=_words(args.roles),
            every_s=args.every,
            max_stop_s=args.max_stop,
            has_points=args.points,
            sweep=_points(args.each_point),
            json_file=args.json,
        ),
    )


def _points(text: str) -> list[str]:
    """Beginnings of places: the empty one of all; a comma too many is refused as it was typed."""
    return [""] if text == "all" else [word or "," for word in text.split(",") if text]


def _words(text: str) -> list[str]:
    return [word for word in text.split(",") if word]
