"""`rlstreams chaos CONFIG...`: kill and stop processes of a run at random, then audit it."""

from __future__ import annotations

import argparse
import shlex

from workers.cli.arguments import add_config, add_no_live, examples, real, whole


def add(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the command."""
    parser = subparsers.add_parser(
        "chaos",
        help="run everything as `up` does, kill processes at random meanwhile, audit",
        description="Starts the run as `up` does, strikes its processes and its embedded broker "
        "as a plan says that follows from --seed, lets it finish, and says what the log tells: "
        "every sample accounted for, recovery times, tokens made twice. Exit status 1 on any "
        "breach or hang, or if not all faults were possible.",
        epilog=examples(
            "rlstreams chaos run.toml --run.id=chaos --kills 12 --seed 1 --points",
            "rlstreams chaos run.toml --run.id=points --each-point commit,offsets",
        ),
    )
    add_config(parser)
    _add_faults(parser)
    parser.add_argument(
        "--steps",
        type=whole(1),
        metavar="N",
        help="optimizer steps; default: the configured ones, and one for each fault at least",
    )
    parser.add_argument(
        "--recompute", action="store_true", help="at the end do all steps again from the log"
    )
    parser.add_argument("--json", default="", metavar="FILE", help="write all figures there")
    add_no_live(parser)
    parser.set_defaults(run=run)


def _add_faults(parser: argparse.ArgumentParser) -> None:
    """Who is struck, how and when."""
    parser.add_argument(
        "--kills", type=whole(1), default=12, metavar="N", help="faults (%(default)s)"
    )
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="of the plan (%(default)s)"
    )
    parser.add_argument(
        "--roles",
        default="",
        metavar="A,B",
        help="who is struck: rollout, logprob, trainer, prompts, broker, server (the model servers "
        "that rollout workers start; they are only killed); default: all that there are",
    )
    parser.add_argument(
        "--every",
        type=real(0.0),
        default=5.0,
        metavar="SECONDS",
        help="mean time between two faults (%(default)g)",
    )
    parser.add_argument(
        "--periodic",
        action="store_true",
        help="exactly --every apart, from the first step on, not half to one and a half of it; "
        "nothing strikes earlier because the run nears its end",
    )
    parser.add_argument(
        "--max-stop",
        type=real(0.0),
        default=40.0,
        metavar="SECONDS",
        help="longest SIGSTOP (%(default)g: beyond the transaction timeout)",
    )
    parser.add_argument(
        "--points", action="store_true", help="also die at named places of the code"
    )
    parser.add_argument(
        "--each-point",
        default="",
        metavar="all|A,B",
        help="instead of N random faults: every role dies once at each named place that it "
        "passes, or at those that begin so, e.g. commit,offsets",
    )


def run(args: argparse.Namespace) -> int:
    """Run it; 0 only if all faults happened and nothing broke."""
    from workers.chaos.run import Wish, chaos
    from workers.config.load import load
    from workers.supervisor.up import Asked

    overrides = [*args.overrides, "--demo.kills=[]"]  # the plan kills enough
    steps = args.steps or max(args.kills + 1, load(args.config, overrides).trainer.steps)
    config = load(args.config, [*overrides, f"--trainer.steps={steps}"])
    command = shlex.join(["up", *args.config, *args.overrides])
    return chaos(
        Asked(config=config, command=command, is_resumed=False, is_live=not args.no_live),
        Wish(
            num_faults=args.kills,
            seed=args.seed,
            roles=_words(args.roles),
            every_s=args.every,
            is_periodic=args.periodic,
            max_stop_s=args.max_stop,
            has_points=args.points,
            sweep=_points(args.each_point),
            is_recomputed=args.recompute,
            json_file=args.json,
        ),
    )


def _points(text: str) -> list[str]:
    """Beginnings of places: the empty one of all; a comma too many is refused as it was typed."""
    return [""] if text == "all" else [word or "," for word in text.split(",") if text]


def _words(text: str) -> list[str]:
    return [word for word in text.split(",") if word]
