"""`rlstreams replay ACTION`: a recording into a fresh run, or what a role computed done again."""

from __future__ import annotations

import json
import math
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rlstreams.cli.named import NamedRun, Progress, opened, print_json
from rlstreams.cli.options import LOG, Group, N, argument, command, one_of, option, set_threads
from rlstreams.debug.blame import KINDS
from rlstreams.streams.log.errors import ConfigError
from rlstreams.streams.log.text import counted

if TYPE_CHECKING:
    from rlstreams.debug.replay.player import Selection
    from rlstreams.streams.recording import Recording
    from rlstreams.workers.config.run import RunConfig

SPEED = "max"
LEARNT = "learnt"

REPLAY = Group(
    "replay",
    "a recording into a fresh run; or a role's or a step's work done again, and compared",
    was="run",
)
Declared = Callable[[Namespace], int]


def _of_recording(run: Declared) -> Declared:
    """What each action but `step` takes."""
    run = option("--steps", metavar="A:B", help="only these steps, and all their groups")(run)
    return argument("RECORDING", "its folder")(run)


def _fresh(run: Declared) -> Declared:
    """Where a fresh run is to be."""
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
    """It, open, and the steps that are meant; what is wrong with it is said."""
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
    """Recorded seconds per second. Raises ConfigError: not above 0."""
    try:
        speed = math.inf if text == SPEED else float(text.removesuffix("x"))
    except ValueError:
        speed = 0.0
    if not speed > 0:
        raise ConfigError(f"--speed must be a number above 0, or max, got {text!r}")
    return speed


def _play(args: Namespace, recording: Recording, selection: Selection | None) -> None:
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
    from rlstreams.debug.rerun.rebuilt import steps_again

    print(f"{'step':>5}  {'samples':>7}  {'batch':<14} {'loss':>22}  {'weights':<14} compared")
    num_equal = num_steps = num_samples = 0
    for step, differences in steps_again(
        RecordingBus(recording), config, last=last, keep_weights=weights
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


def _looked_into(run: Declared) -> Declared:
    """What those take that do steps of a run or a recording again."""
    run = option("--checkpoints", metavar="DIR", multiple=True, help="also look here")(run)
    return option("--model", metavar="DIR", help="where the model folder is now", default="")(run)


@contextmanager
def _steps_of(args: Namespace) -> Iterator[tuple[NamedRun, RunConfig, list[Path]]]:
    """The run or recording that is named, its configuration, and where its checkpoints may be."""
    from rlstreams.streams.run.places import CHECKPOINTS, check_folder_of
    from rlstreams.workers.config.load import from_json

    for name in args.checkpoints:
        check_folder_of(CHECKPOINTS, name, "--checkpoints")
    with opened(*args.config) as found_run:
        for problem in found_run.log.problems:
            print(f"warning: {problem}", file=sys.stderr)
        config = found_run.config or from_json(json.dumps(found_run.log.configuration))
        path = args.model or config.model.path
        config = replace(config, model=replace(config.model, path=path))
        set_threads(config.model.threads)
        extra = [Path(name) for name in args.checkpoints]
        yield found_run, config, [found_run.folder / "checkpoints", *extra]


@command(
    "step",
    "rlstreams replay step 7 recordings/demo",
    "rlstreams replay step 7 runs/demo --set trainer.loss.clip_high=0.01",
    "rlstreams replay step 7 runs/demo --profile step-7.json",
    of=REPLAY,
    takes=LOG,
)
@argument("N", "the step", type=N)
@option(
    "--set",
    metavar="NAME=VALUE",
    multiple=True,
    help="re-run it a second time with this changed: trainer.loss.*, trainer.optimizer.*, "
    "trainer.micro_batch_tokens, trainer.minibatches, trainer.batch_epochs, trainer.control",
)
@option("--json", is_flag=True, help="print what was compared as one JSON object")
@_looked_into
@option(
    "--profile",
    metavar="FILE",
    help="instead, do it twice and write a torch trace of the second time, for "
    "https://ui.perfetto.dev; print the kernels that take longest",
    default="",
)
def step(args: Namespace) -> int:
    """re-execute a recorded step and compare it; with --set, also a changed one

    Loads the newest checkpoint before the step, redoes the steps in between, then the step
    itself. Writes nothing. Exit status 1 if anything differs.
    """
    with _steps_of(args) as (found_run, config, folders):
        from rlstreams.debug.rerun.rerun import changed_config, lines, profile, rerun

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


METRIC = "held_out (the reward of held-out rows), or one of a step: kl, entropy, grad_norm, ..."


@command(
    "bisect",
    "rlstreams replay bisect recordings/demo --metric held_out",
    "rlstreams replay bisect runs/demo --metric entropy --band 0.02:",
    of=REPLAY,
    takes=LOG,
)
@option("--metric", metavar="NAME", help=METRIC, default="held_out", show_default=True)
@option(
    "--band",
    metavar="LOW:HIGH",
    help="what is usual, LOW: and :HIGH too; learnt: median and deviation of the steps before",
    default=LEARNT,
    show_default=True,
)
@option("--json", is_flag=True, help="print it as one JSON object")
@_looked_into
def bisect(args: Namespace) -> int:
    """the first step at which a metric left its band for good

    Between two evaluations it makes versions again and evaluates them, half way each time. Writes
    nothing. Exit status 0 also if there is no such step.
    """
    from rlstreams.debug.blame.band import band_of

    band = None if args.band == LEARNT else band_of(args.band)
    with _steps_of(args) as (found_run, config, folders):
        from rlstreams.debug.blame.bisect import bisect as bisected

        progress = Progress()
        found = bisected(
            found_run.log, config, args.metric, band=band, checkpoints=folders, say=progress
        )
        progress("")
    if args.json:
        print_json({**asdict(found), "blamed": found.blamed})
    else:
        print("\n".join(found.lines(str(found_run.folder))))
    return 0


@command(
    "blame",
    "rlstreams replay blame recordings/demo --steps 16 --metric held_out",
    "rlstreams replay blame runs/demo --steps 30:31 --metric entropy --by worker",
    of=REPLAY,
    takes=LOG,
)
@option("--steps", metavar="A:B", help="whose samples may be to blame", required=True)
@option("--metric", metavar="NAME", help=METRIC, default="")
@option("--by", type=one_of(*KINDS), help="a set is", default="group", show_default=True)
@option("--at", metavar="N", type=N, help="the step whose figure is measured, from B on")
@option(
    "--rewards",
    metavar="FILE",
    help="not left out, but with these rewards: JSON lines of group_id, sample, reward",
)
@option("--json", is_flag=True, help="print it as one JSON object")
@_looked_into
def blame(args: Namespace) -> int:
    """which samples of some steps explain a change of a metric

    Does the steps again without a set of samples, measures the metric behind them, and halves; what
    an effect must be is told by random sets. Writes nothing. Exit status 0 also if it is nobody.
    """
    from rlstreams.debug.replay.player import range_of
    from rlstreams.words.spelling import spelling

    steps = range_of(args.steps)
    assert steps is not None, "it is required"
    with _steps_of(args) as (found_run, config, folders):
        from rlstreams.debug.blame.blame import blame as blamed
        from rlstreams.debug.blame.sets import rewards_of
        from rlstreams.debug.blame.text import lines

        progress = Progress()
        found = blamed(
            found_run.log,
            config,
            steps,
            metric=args.metric,
            by=args.by,
            at=args.at or 0,
            rewards=rewards_of(Path(args.rewards)) if args.rewards else None,
            checkpoints=folders,
            spelled=spelling("", config.model.path),
            say=progress,
        )
        progress("")
    if args.json:
        print_json(found)
    else:
        print("\n".join(lines(found)))
    return 0
