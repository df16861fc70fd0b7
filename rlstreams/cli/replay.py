"""`rlstreams replay ACTION`: a recording into a fresh run, or what a role computed done again."""

from __future__ import annotations

import json
import math
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rlstreams.cli.named import Progress, opened, print_json
from rlstreams.cli.options import LOG, Group, N, argument, command, option, set_threads
from rlstreams.streams.log.errors import ConfigError
from rlstreams.streams.log.text import counted

if TYPE_CHECKING:
    from rlstreams.cli.named import NamedRun
    from rlstreams.debug.replay.player import Played, Selection
    from rlstreams.debug.rerun.findings import Finding
    from rlstreams.streams.recording import Recording
    from rlstreams.workers.config.run import RunConfig
    from rlstreams.workers.trainer.redo.redo import RedoneStep

SPEED = "max"

REPLAY = Group(
    "replay",
    "a recording into a fresh run; work done again, and compared; a run that goes on from a step",
    was="run",
)
Declared = Callable[[Namespace], int]


def _of_recording(run: Declared) -> Declared:
    """What the actions on a recording take."""
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
    from rlstreams.debug.replay.fresh import fresh_run
    from rlstreams.debug.replay.player import chosen, play, replay_config

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
    from rlstreams.debug.rerun.rebuilt import steps_again

    beside = [recording.folder / "checkpoints"]  # of a branch the one that it began with
    print(f"{'step':>5}  {'samples':>7}  {'batch':<14} {'loss':>22}  {'weights':<14} compared")
    num_equal = num_steps = num_samples = 0
    for step, differences in steps_again(
        RecordingBus(recording), config, last=last, checkpoints=beside, keep_weights=weights
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
@option("--checkpoints", metavar="DIR", multiple=True, help="also look here")
@option("--model", metavar="DIR", help="where the model folder is now", default="")
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
    from rlstreams.streams.run.places import CHECKPOINTS, check_folder_of

    for name in args.checkpoints:
        check_folder_of(CHECKPOINTS, name, "--checkpoints")
    with opened(*args.config) as found_run:
        found_config = _config_of(found_run)
        path = args.model or found_config.model.path
        config = replace(found_config, model=replace(found_config.model, path=path))
        set_threads(config.model.threads)
        from rlstreams.debug.rerun.rerun import changed_config, lines, profile, rerun

        extra = [Path(name) for name in args.checkpoints]
        folders = [found_run.folder / "checkpoints", *extra]
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


def _config_of(found_run: NamedRun) -> RunConfig:
    """Of a run or a recording; what is wrong with that is said."""
    from rlstreams.workers.config.load import from_json

    for problem in found_run.log.problems:
        print(f"warning: {problem}", file=sys.stderr)
    return found_run.config or from_json(json.dumps(found_run.log.configuration))


@command(
    "judge",
    "rlstreams replay judge runs/demo --reward stricter.py:reward",
    "rlstreams replay judge recordings/demo --verifier numeric --option tolerance=0.01",
    "rlstreams replay judge runs/demo",
    of=REPLAY,
    takes=LOG,
)
@option("--reward", metavar="FILE.py:NAME", help="your function judges", default="")
@option("--verifier", metavar="NAME", help="a verifier of ours judges", default="")
@option(
    "--option", metavar="NAME=VALUE", multiple=True, help="keyword argument of whichever judges"
)
@option("--tokenizer", metavar="DIR", help="where tokenizer.json is, if it has moved", default="")
@option("--json", is_flag=True, help="print all of it as one JSON object")
def judge(args: Namespace) -> int:
    """judge recorded answers again, and show what another reward would have changed

    Without --reward and --verifier the run's own [reward] judges, with its files as they are now.
    Shows samples whose reward would be another, steps whose advantages would be, and whether the
    recorded advantages come out of the recorded rewards. Writes nothing. Exit status 1 if a reward
    would be another, or the grader failed on a sample.
    """
    from rlstreams.debug.rejudge.rejudge import grader_of, rejudge
    from rlstreams.debug.rejudge.text import as_json, lines
    from rlstreams.words.screen import visible
    from rlstreams.words.spelling import spelling

    with opened(*args.config) as found_run:
        config, log = _config_of(found_run), found_run.log
        spelled = spelling(args.tokenizer, found_run.model_path)
        if not spelled.hash:
            raise ConfigError(
                f"there is no tokenizer in {found_run.model_path or 'the model folder'}, so nobody "
                "can say what was answered: name a folder that has it, --tokenizer DIR"
            )
        with grader_of(config.reward, args.reward, args.verifier, args.option) as grader:
            found = rejudge(log, grader, spelled.plain, config.trainer)
    if not found.outcomes:
        raise ConfigError(f"{log.name} has no finished sample: there is nothing to judge")
    if args.json:
        print_json(as_json(found, grader, log.name))
    else:
        print("\n".join(visible(line) for line in lines(found, grader, log.name)))
    return int(bool(found.num_changed or found.num_failed))


@command(
    "branch",
    "rlstreams replay branch runs/demo --at 30 --set trainer.optimizer.lr=1e-4",
    "rlstreams replay branch recordings/demo --at 30 --as slower",
    of=REPLAY,
    takes=LOG,
)
@option("--at", metavar="STEP", type=N, help="its own steps begin behind it", required=True)
@option(
    "--set",
    metavar="NAME=VALUE",
    multiple=True,
    help="what the branch does otherwise; what --resume refuses cannot change here either",
)
@option("--as", "as_", metavar="RUN_ID", help="its id (the parent's and -at-STEP)", default="")
@option("--dir", metavar="DIR", help="its folder (runs/RUN_ID)", default="")
@option("--checkpoints", metavar="DIR", multiple=True, help="of the parent: also look here")
def branch(args: Namespace) -> int:
    """make a run that goes on from another one's state behind a step

    Loads the parent's checkpoint of that step, or redoes the steps since the one before, and
    compares each hash. Copies no record: the branch holds where its parent stood, and a
    checkpoint. `rlstreams up DIR` runs it.
    """
    from rlstreams.streams.run.places import CHECKPOINTS, check_folder_of
    from rlstreams.workers.config.load import from_json

    for name in args.checkpoints:
        check_folder_of(CHECKPOINTS, name, "--checkpoints")
    with opened(*args.config) as parent:
        for problem in parent.log.problems:
            print(f"warning: {problem}", file=sys.stderr)
        config = parent.config or from_json(json.dumps(parent.log.configuration))
        set_threads(config.model.threads)
        from rlstreams.debug.branch.branch import BranchPlace, branch

        own = parent.folder / "checkpoints"
        place = BranchPlace(
            parent=str(parent.folder.resolve()),
            checkpoints=[own, *map(Path, args.checkpoints)],
            run_id=args.as_,
            folder=args.dir,
            is_recording=parent.config is None,
        )
        made = branch(parent.log.bus, place, args.at, args.set)
    print("\n".join(made.lines()))
    return 0
