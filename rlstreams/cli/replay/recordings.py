"""`rlstreams replay run | trainer | logprob`: a recording's records, steps or scores, redone."""

from __future__ import annotations

import math
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rlstreams.cli.named import ProgressLine
from rlstreams.cli.options import argument, command, option, set_threads
from rlstreams.cli.replay.group import REPLAY, trusts
from rlstreams.streams.log.errors import ConfigError
from rlstreams.streams.log.text import counted

if TYPE_CHECKING:
    from rlstreams.debug.replay.player import Selection
    from rlstreams.streams.recording import Recording

SPEED = "max"
Declared = Callable[[Namespace], int]


def _of_recording(run: Declared) -> Declared:
    """Add the argument and the option of actions on a recording."""
    run = option("--steps", metavar="A:B", help="only these steps, and all their groups")(run)
    return argument("RECORDING", "its folder")(run)


def _fresh(run: Declared) -> Declared:
    """Add the options that name a fresh run and its folder."""
    run = option("--dir", metavar="DIR", help="its folder (runs/RUN_ID)", default="")(run)
    about = "id of the fresh run (default: the recorded id plus -replay)"
    return option("--as", "as_", metavar="RUN_ID", help=about, default="")(run)


@command(
    "run",
    "rlstreams replay run recordings/demo --as slow --speed 2 --steps 5:",
    of=REPLAY,
)
@_of_recording
@_fresh
@option("--bootstrap", metavar="HOST:PORT", help="a broker; default: an embedded one", default="")
@option(
    "--speed", metavar="FACTOR", help="1 as recorded, 10, ...", default=SPEED, show_default=True
)
def run(args: Namespace) -> int:
    """play a recording into a fresh run

    Records keep their bytes, keys and partitions; the header rlstreams-replay-of names their
    recorded offset. Refuses to replay into a run that has records. Exit status 1 if the
    recording lacks records.
    """
    with _recording(args) as (recording, steps):
        from rlstreams.debug.replay.player import selection_of

        _play(args, recording, selection_of(recording, steps))
        if recording.problems:
            print("records are missing in the recording: see the warnings above", file=sys.stderr)
            return 1
    return 0


@command(
    "trainer",
    "rlstreams replay trainer recordings/demo",
    "rlstreams replay trainer recordings/demo --keep-weights --as again",
    of=REPLAY,
)
@_of_recording
@_fresh
@option("--keep-weights", is_flag=True, help="keep every version that it makes")
@trusts
def trainer(args: Namespace) -> int:
    """train on the recorded batches again, from step 1, and compare every step

    Starts and writes nothing, but versions if they are to be kept. Exit status 1 if a step
    differs in anything, by a bit.
    """
    if not args.keep_weights and (typed := [o for o in ("as", "dir") if vars(args)[_DEST[o]]]):
        names = ", ".join(f"--{name}" for name in typed)
        raise ConfigError(f"{names}: of no use without --keep-weights; leave it out")
    with _recording(args) as (recording, steps):
        return _trainer(args, recording, steps)


_DEST = {"as": "as_", "dir": "dir"}


@command(
    "logprob",
    "rlstreams replay logprob recordings/demo --weights runs/demo/weights",
    of=REPLAY,
)
@_of_recording
@option(
    "--weights",
    metavar="DIR",
    multiple=True,
    help="folder of weight versions, in addition to the recording's",
)
def logprob(args: Namespace) -> int:
    """score the recorded windows again, and compare every score

    Starts and writes nothing. Exit status 1 if a score differs, by a bit.
    """
    from rlstreams.debug.replay.player import selection_of
    from rlstreams.streams.run.places import VERSIONS, check_folder_of

    for name in args.weights:
        check_folder_of(VERSIONS, name, "--weights")
    with _recording(args) as (recording, steps):
        return _logprob(args, recording, selection_of(recording, steps))


@contextmanager
def _recording(args: Namespace) -> Iterator[tuple[Recording, range | None]]:
    """Open the recording; yield it with the chosen steps; print its problems on stderr."""
    from rlstreams.debug.replay.player import range_of
    from rlstreams.streams.recording import Recording
    from rlstreams.streams.run.places import RECORDINGS, check_place

    steps = range_of(args.steps)
    check_place(args.recording, [RECORDINGS])
    with Recording(args.recording) as recording:
        for problem in recording.problems:
            print(f"warning: {problem}", file=sys.stderr)
        yield recording, steps


def speed_of(text: str) -> float:
    """Return the speed in recorded seconds per second. Raises ConfigError: not above 0."""
    try:
        speed = math.inf if text == SPEED else float(text.removesuffix("x"))
    except ValueError:
        speed = 0.0
    if not speed > 0:
        raise ConfigError(f"--speed must be a number above 0, or max, got {text!r}")
    return speed


def _play(args: Namespace, recording: Recording, selection: Selection | None) -> None:
    from rlstreams.debug.replay.fresh import fresh_run
    from rlstreams.debug.replay.player import chosen, play, replay_config

    speed, progress = speed_of(args.speed), ProgressLine()
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
        print("\n".join(played.lines()))
        print(f"run {config.run.id} is in folder {Path(config.folder)}")


def _logprob(args: Namespace, recording: Recording, selection: Selection | None) -> int:
    """Score the recorded windows again; 0 only if every score is equal."""
    from rlstreams.debug.replay.player import recorded_config

    config = recorded_config(recording)
    set_threads(config.model.threads)
    from rlstreams.debug.replay.scores_again import scores_again

    made = scores_again(recording, config, [Path(name) for name in args.weights], selection)
    print("\n".join(made.lines()))
    return 0 if made.is_equal else 1


def _trainer(args: Namespace, recording: Recording, steps: range | None) -> int:
    """Do the recorded steps again; 0 only if every one is equal."""
    from rlstreams.debug.replay.player import ENDLESS, recorded_config, replay_config
    from rlstreams.streams.recording.bus import RecordingBus
    from rlstreams.streams.run.places import CONFIG_FILE

    if steps is not None and steps.start > 1:
        raise ConfigError("--steps: the trainer begins with step 1; `replay step` begins elsewhere")
    last = 0 if steps is None or steps.stop > ENDLESS else steps.stop - 1
    config, weights = recorded_config(recording), None
    if args.keep_weights:
        fresh = replay_config(recording, run_id=args.as_, folder=args.dir, bootstrap="")
        if (Path(fresh.folder) / CONFIG_FILE).exists():
            raise ConfigError(f"{fresh.folder} is the folder of a run: name another with --dir DIR")
        weights = Path(fresh.folder) / "weights"
    set_threads(config.model.threads)
    from rlstreams.debug.rerun.findings import again_lines
    from rlstreams.debug.rerun.foreign_code import refuse_foreign_code
    from rlstreams.debug.rerun.rebuilt import steps_again

    bus = RecordingBus(recording)
    refuse_foreign_code(bus, args.recording, is_trusted=args.trust_code)
    beside = [recording.folder / "checkpoints"]  # a branch's first checkpoint lies there
    print(f"{'step':>5}  {'samples':>7}  {'batch':<14} {'loss':>22}  {'weights':<14} compared")
    num_equal = num_steps = num_samples = 0
    for step, differences in steps_again(
        bus, config, last=last, checkpoints=beside, keep_weights=weights
    ):
        print("\n".join(again_lines(step, differences)), flush=True)
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
