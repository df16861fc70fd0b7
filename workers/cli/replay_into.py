"""`rlstreams replay RECORDING --into ROLE`: one real role, and what it does differently."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from workers.cli.replay import fresh_target

if TYPE_CHECKING:
    from streams.recording import Recording
    from workers.replay.into_trainer import ReplayedStep, TrainerReplay


def run_into(args: argparse.Namespace, recording: Recording) -> int:
    """Feed the role and compare; 0 only if it made the same."""
    roles = {"trainer": _trainer}
    return roles[args.into](args, recording)


def _trainer(args: argparse.Namespace, recording: Recording) -> int:
    from workers.replay.into_trainer import replay_trainer

    print(f"{'step':>5}  {'samples':>7}  {'batch':<14} {'loss':>22}  {'weights':<14} compared")
    with fresh_target(args, recording) as target:
        made = replay_trainer(
            recording,
            target,
            last_step=_last_step(args),
            keep_weights=args.keep_weights,
            on_step=_print_step,
        )
    print(_verdict(made))
    return 0 if made.num_equal == len(made.steps) else 1


def _last_step(args: argparse.Namespace) -> int:
    from streams.errors import ConfigError

    if args.begin:
        raise ConfigError("--from: the trainer begins with step 1; rerun-step begins elsewhere")
    kind, _, number = args.end.partition(":")
    if args.end and (kind != "step" or not number.isdecimal()):
        raise ConfigError(f"--to must be step:N for the trainer, got {args.end!r}")
    return int(number or 0)


def _print_step(step: ReplayedStep) -> None:
    again = step.again
    verdict = "equal" if not step.differences else f"{len(step.differences)} fields differ"
    print(
        f"{again.step:>5}  {len(again.samples):>7}  {again.batch_hash[:12]:<14} "
        f"{again.loss!r:>22}  {again.weight_hash[:12]:<14} {verdict}",
        flush=True,
    )
    for difference in step.differences[:5]:
        print(f"       {difference}")


def _verdict(made: TrainerReplay) -> str:
    lines = [
        f"{made.num_equal} of {len(made.steps)} steps equal, bit for bit: samples, order, masks, "
        "micro-batches, batch hash, loss, metrics, weight hash",
        f"{made.num_fed:,} scored trajectories were fed in the order of the recorded steps",
    ]
    if made.num_not_fed:
        lines.append(
            f"{made.num_not_fed} groups that the run dropped because of the time were not fed"
        )
    if len(made.steps) < made.last_step:
        lines.append(f"steps {len(made.steps) + 1} to {made.last_step} were not asked for")
    return "\n".join(lines)
