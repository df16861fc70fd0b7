"""`rlstreams replay RECORDING --into ROLE`: one real role, and what it does differently."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from rlstreams.cli.replay_options import fresh_target, record_filter
from rlstreams.streams.log.counted import counted

if TYPE_CHECKING:
    from rlstreams.debug.replay.into_logprob import ScoreReplay
    from rlstreams.debug.replay.into_trainer import ReplayedStep, TrainerReplay
    from rlstreams.debug.replay.target import Target
    from rlstreams.debug.replay.weights import RecordedWeights
    from rlstreams.streams.recording import Recording


def run_into(args: argparse.Namespace, recording: Recording) -> int:
    """Feed the role and compare; 0 only if it made the same."""
    roles = {"trainer": _trainer, "logprob": _logprob, "rollout": _rollout}
    return roles[args.into](args, recording)


def _trainer(args: argparse.Namespace, recording: Recording) -> int:
    from rlstreams.debug.replay.into_trainer import replay_trainer

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


def _logprob(args: argparse.Namespace, recording: Recording) -> int:
    from rlstreams.debug.replay.filters import resolve
    from rlstreams.debug.replay.into_logprob import replay_logprob

    selection = resolve(recording, record_filter(args))
    with fresh_target(args, recording) as target:
        weights = _weights(args, recording, target)
        made = replay_logprob(recording, target, weights, selection=selection)
    print("\n".join(_scores(made)))
    return 0 if made.is_equal else 1


def _rollout(args: argparse.Namespace, recording: Recording) -> int:
    from rlstreams.debug.replay.filters import resolve
    from rlstreams.debug.replay.into_rollout import replay_rollout

    selection = resolve(recording, record_filter(args))
    with fresh_target(args, recording) as target:
        weights = _weights(args, recording, target)
        made = replay_rollout(recording, target, weights, selection=selection)
    num_other = made.num_different - made.num_same_tokens
    print(
        f"{counted(made.num_equal, 'trajectory', 'trajectories')} equal, bit for bit; "
        f"{made.num_same_tokens:,} with the same tokens and reward "
        f"(log-probs at most {made.largest_gap:.3g} apart), "
        f"{num_other:,} with others, {made.num_failed:,} failed"
    )
    lines = [f"  {name}: in {count:,}" for name, count in made.by_field.most_common()]
    lines += [f"{count:,} not fed: {why}" for why, count in made.skipped.most_common()]
    print("\n".join(lines))
    return 0 if made.is_equal else 1


def _weights(args: argparse.Namespace, recording: Recording, target: Target) -> RecordedWeights:
    from rlstreams.debug.replay.target import recorded_config
    from rlstreams.debug.replay.weights import RecordedWeights

    folders = [Path(name) for name in args.weights]
    own = target.folder / "weights"
    found = RecordedWeights(recording, recorded_config(recording), folders, own)
    missing = sorted(found.known - found.available)
    print(
        f"weights of {len(found.available)} of {len(found.known)} versions are available"
        + (f"; missing: {', '.join(map(str, missing))}" if missing else "")
    )
    return found


def _scores(made: ScoreReplay) -> list[str]:
    num_equal = counted(made.num_equal, "scored trajectory", "scored trajectories")
    lines = [
        f"{num_equal} equal, bit for bit; {made.num_different:,} different, "
        f"{made.num_failed:,} not scored"
    ]
    lines += [f"  {name}: in {count:,}" for name, count in made.by_field.most_common()]
    if made.first is not None:
        (group, number), difference = made.first
        lines += [
            f"  largest distance {made.largest_gap:.3g}",
            f"first: sample {group}/{number}, {difference.path}: "
            f"{difference.one} recorded, {difference.other} now",
        ]
        lines += [f"    {difference.context}"] if difference.context else []
    lines += [f"{count:,} not fed: {why}" for why, count in made.skipped.most_common()]
    return lines


def _last_step(args: argparse.Namespace) -> int:
    from rlstreams.streams.log.errors import ConfigError

    if args.begin:
        raise ConfigError("--from: the trainer begins with step 1; rerun-step begins elsewhere")
    kind, _, number = args.end.partition(":")
    if args.end and (kind != "step" or not number.isdecimal()):
        raise ConfigError(f"--to must be step:N for the trainer, got {args.end!r}")
    return int(number or 0)


def _print_step(step: ReplayedStep) -> None:
    again = step.again
    verdict = "equal" if not step.differences else _fields(len(step.differences))
    print(
        f"{again.step:>5}  {len(again.samples):>7}  {again.batch_hash[:12]:<14} "
        f"{again.loss!r:>22}  {again.weight_hash[:12]:<14} {verdict}",
        flush=True,
    )
    for difference in step.differences[:5]:
        print(f"       {difference.path}: recorded {difference.one}, now {difference.other}")


def _fields(count: int) -> str:
    return "1 field differs" if count == 1 else f"{count} fields differ"


def _verdict(made: TrainerReplay) -> str:
    lines = [
        f"{made.num_equal} of {len(made.steps)} steps equal, bit for bit: samples, order, masks, "
        "micro-batches, batch hash, loss, metrics, weight hash",
        f"{counted(made.num_fed, 'scored trajectory was', 'scored trajectories were')} fed "
        "in the order of the recorded steps",
    ]
    if made.num_not_fed:
        them = counted(made.num_not_fed, "group")
        were = "was" if made.num_not_fed == 1 else "were"
        lines.append(f"{them} that the run dropped because of the time {were} not fed")
    if len(made.steps) < made.last_step:
        first = len(made.steps) + 1
        lines.append(
            f"step {first} was not requested"
            if first == made.last_step
            else f"steps {first} to {made.last_step} were not requested"
        )
    return "\n".join(lines)
