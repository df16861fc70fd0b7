"""`rlstreams replay RECORDING`: a recording into a fresh run, or one role's work done again."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rlstreams.cli.arguments import Progress, command, set_threads
from rlstreams.streams.log.errors import ConfigError
from rlstreams.streams.log.text import counted

if TYPE_CHECKING:
    from rlstreams.debug.replay.player import Played, Selection
    from rlstreams.debug.rerun.findings import Finding
    from rlstreams.streams.recording import Recording
    from rlstreams.workers.config.run import RunConfig
    from rlstreams.workers.trainer.redo.redo import RedoneStep

SPEED = "max"
_UNUSED = {  # options that do nothing with an --into
    "": ("--weights", "--keep-weights"),
    "trainer": ("--bootstrap", "--speed", "--weights"),
    "logprob": ("--bootstrap", "--speed", "--as", "--dir", "--keep-weights"),
}


@command("replay")
def run(args: argparse.Namespace) -> int:
    """play a recording into a fresh run, or do again what one role computed

    Records keep their bytes, keys and partitions; the header rlstreams-replay-of names their
    recorded offset. Refuses to replay into a run that has records. With --into nothing is
    started or written: that role's steps or scores are computed again from the recording and
    compared. Exit status 1 if the recording lacks records, or with --into if anything differs.

    RECORDING              its folder
    --as RUN_ID            id of the fresh run (default: the recorded id plus -replay)
    --dir DIR              its folder (runs/RUN_ID)
    --bootstrap HOST:PORT  a broker; default: an embedded one
    --speed FACTOR         1 as recorded, 10, ... [max]
    --steps A:B            only these steps, and all their groups; the trainer begins with 1
    --into trainer|logprob  compute what this role did again, and compare
    --weights DIR...       folder of weight versions, in addition to the recording's
    --keep-weights         trainer: keep every version that it makes

    rlstreams replay recordings/demo --as slow --speed 2 --steps 5:
    rlstreams replay recordings/demo --into trainer
    """
    from rlstreams.debug.replay.player import range_of, selection_of
    from rlstreams.streams.recording import Recording
    from rlstreams.streams.run.places import RECORDINGS, VERSIONS, check_folder_of, check_place

    _refuse_unused(args)
    steps = range_of(args.steps)
    check_place(args.recording, [RECORDINGS])
    for name in args.weights:
        check_folder_of(VERSIONS, name, "--weights")
    with Recording(args.recording) as recording:
        for problem in recording.problems:
            print(f"warning: {problem}", file=sys.stderr)
        if args.into == "trainer":
            return _trainer(args, recording, steps)
        selection = selection_of(recording, steps)
        if args.into:
            return _logprob(args, recording, selection)
        _play(args, recording, selection)
        if recording.problems:
            print("records are missing in the recording: see the warnings above", file=sys.stderr)
            return 1
    return 0


def _refuse_unused(args: argparse.Namespace) -> None:
    """Refuse what would be ignored. Raises ConfigError: names the options."""
    unused, where = _UNUSED[args.into or ""], f"--into {args.into}" if args.into else "no --into"
    if args.into == "trainer" and not args.keep_weights:  # which names their folder
        unused, where = (*unused, "--as", "--dir"), f"{where} and no --keep-weights"
    values = {**vars(args), "as": args.as_, "speed": args.speed != SPEED}
    if typed := [name for name in unused if values[name[2:].replace("-", "_")]]:
        raise ConfigError(f"{', '.join(typed)}: of no use with {where}; leave it out")


def speed_of(text: str) -> float:
    """Recorded seconds per second. Raises ConfigError: not above 0."""
    try:
        speed = math.inf if text == SPEED else float(text.removesuffix("x"))
    except ValueError:
        speed = 0.0
    if not speed > 0:
        raise ConfigError(f"--speed must be a number above 0, or max, got {text!r}")
    return speed


def _play(args: argparse.Namespace, recording: Recording, selection: Selection | None) -> None:
    from rlstreams.debug.replay.player import chosen, fresh_run, play, replay_config

    speed, progress = speed_of(args.speed), Progress()
    config = replay_config(recording, run_id=args.as_, folder=args.dir, bootstrap=args.bootstrap)
    with fresh_run(config, schemas=[*recording.schemas.values()]) as bus:
        played = play(
            bus,
            recording.manifest.run,
            chosen(recording, selection),
            speed,
            on_progress=lambda num: progress(f"{counted(num, 'record')} played"),
        )
        progress("")
        _tell(played, config)


def _tell(played: Played, config: RunConfig) -> None:
    for topic, count in sorted(played.by_topic.items()):
        print(f"{topic:<20} {count:>10,}")
    rate = played.num_records / max(played.seconds, 1e-9)
    print(
        f"{counted(played.num_records, 'record')}, {played.num_bytes / 1e6:,.1f} MB in "
        f"{played.seconds:.1f} s ({rate:,.0f} a second) into run {config.run.id}, "
        f"folder {Path(config.folder)}"
    )


def _logprob(args: argparse.Namespace, recording: Recording, selection: Selection | None) -> int:
    """Score the recorded windows again; 0 only if every score is equal."""
    from rlstreams.debug.replay.player import recorded_config

    config = recorded_config(recording)
    set_threads(config.model.threads)
    from rlstreams.debug.replay.scores_again import scores_again

    made = scores_again(recording, config, [Path(name) for name in args.weights], selection)
    print("\n".join(made.lines()))
    return 0 if made.is_equal else 1


def _trainer(args: argparse.Namespace, recording: Recording, steps: range | None) -> int:
    """Do the recorded steps again; 0 only if every one is equal."""
    from rlstreams.debug.replay.player import ENDLESS, recorded_config, replay_config
    from rlstreams.streams.recording.bus import RecordingBus
    from rlstreams.streams.run.places import CONFIG_FILE

    if steps is not None and steps.start > 1:
        raise ConfigError("--steps: the trainer begins with step 1; rerun-step begins elsewhere")
    last = 0 if steps is None or steps.stop > ENDLESS else steps.stop - 1
    config, weights = recorded_config(recording), None
    if args.keep_weights:
        fresh = replay_config(recording, run_id=args.as_, folder=args.dir, bootstrap="")
        if (Path(fresh.folder) / CONFIG_FILE).exists():
            raise ConfigError(f"{fresh.folder} is the folder of a run: name another with --dir DIR")
        weights = Path(fresh.folder) / "weights"
    set_threads(config.model.threads)
    from rlstreams.debug.rerun.rebuilt import steps_again

    print(f"{'step':>5}  {'samples':>7}  {'batch':<14} {'loss':>22}  {'weights':<14} compared")
    num_equal = num_steps = num_samples = 0
    for step, differences in steps_again(
        RecordingBus(recording), config, last=last, keep_weights=weights
    ):
        _print_step(step, differences)
        num_steps += 1
        num_equal += not differences
        num_samples += len(step.recorded.samples)
        del step  # its records, before the next ones are read
    print(
        f"{num_equal} of {num_steps} steps equal, bit for bit: samples, order, masks, "
        "micro-batches, batch hash, loss, metrics, weight hash\n"
        f"{counted(num_samples, 'scored trajectory', 'scored trajectories')} trained on again"
    )
    return 0 if num_equal == num_steps else 1


def _print_step(step: RedoneStep, differences: Sequence[Finding]) -> None:
    again, differ = step.again, counted(len(differences), "thing")
    print(
        f"{step.fact.step:>5}  {len(step.recorded.samples):>7}  {again.batch_hash[:12]:<14} "
        f"{again.loss!r:>22}  {again.weight_hash[:12]:<14} "
        f"{f'NOT equal in {differ}' if differences else 'equal'}",
        flush=True,
    )
    for one in differences:
        where = f"; first: {one.place}" if one.place else ""
        print(f"       {one.name}: recorded {one.recorded[:60]}, now {one.again[:60]}{where}")
