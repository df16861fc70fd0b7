"""`rlstreams replay step | bisect | blame`: steps of a run or of a recording, done again."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from rlstreams.cli.named import NamedRun, ProgressLine, opened, print_json
from rlstreams.cli.options import LOG, SETTING, N, argument, command, one_of, option, set_threads
from rlstreams.cli.replay.group import REPLAY, config_of, judged_by, spelled_for_grader, trusts
from rlstreams.debug.blame import KINDS

if TYPE_CHECKING:
    from rlstreams.debug.evidence.findings import Evidence
    from rlstreams.debug.evidence.opinion import Opinion
    from rlstreams.workers.config.run import RunConfig

LEARNT = "learnt"
ALL = range(1, sys.maxsize)
Declared = Callable[[Namespace], int]


def _looked_into(run: Declared) -> Declared:
    """Add the options of actions that redo steps of a run or a recording."""
    run = trusts(option("--checkpoints", metavar="DIR", multiple=True, help="also look here")(run))
    return option("--model", metavar="DIR", help="where the model folder is now", default="")(run)


@contextmanager
def _steps_of(args: Namespace) -> Iterator[tuple[NamedRun, RunConfig, list[Path]]]:
    """Open the named run or recording; yield it, its configuration and its checkpoint folders."""
    from rlstreams.streams.run.places import CHECKPOINTS, check_folder_of

    for name in args.checkpoints:
        check_folder_of(CHECKPOINTS, name, "--checkpoints")
    with opened(*args.config) as found_run:
        config = config_of(found_run, is_trusted=args.trust_code)
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
    type=SETTING,
    multiple=True,
    help="re-run it a second time with this changed: trainer.loss.*, trainer.optimizer.*, "
    "trainer.micro_batch_tokens, trainer.shared_prefixes, trainer.minibatches, "
    "trainer.batch_epochs, trainer.control",
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
        from rlstreams.debug.rerun.rerun import lines, profile, rerun

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
            settings=args.set or None,
        )
    if args.json:
        names = "step is_equal started_from num_redone findings environment change"
        print_json({name: getattr(found, name) for name in names.split()})
    else:
        print("\n".join(lines(found)))
    return 0 if found.is_equal else 1


def _evidence(
    found_run: NamedRun,
    config: RunConfig,
    folders: Sequence[Path],
    steps: range,
    say: ProgressLine,
    *,
    redo: bool,
) -> Evidence:
    from rlstreams.debug.evidence.evidence import evidence
    from rlstreams.words.spelling import spelling

    return evidence(
        found_run.log,
        config,
        steps,
        spelled=spelling("", config.model.path),
        redo=redo,
        checkpoints=folders,
        say=say,
    )


def _opinion(
    args: Namespace, found_run: NamedRun, config: RunConfig, steps: range, say: ProgressLine
) -> Opinion | None:
    """Return the opinion of the grader that the options name; None: they name no grader."""
    from rlstreams.debug.evidence.opinion import opinion
    from rlstreams.debug.rejudge.rejudge import grader_of
    from rlstreams.workers.config.across import judging

    if not (args.reward or args.verifier or args.option):
        return None
    spelled = spelled_for_grader("", config.model.path, "--model")
    section = judging(config)
    with grader_of(section, args.reward, args.verifier, args.option) as grader:
        return opinion(found_run.log, grader, spelled.plain, config.trainer, steps, say)


def _checked_log(
    args: Namespace,
    found_run: NamedRun,
    config: RunConfig,
    folders: Sequence[Path],
    steps: range,
    say: ProgressLine,
) -> tuple[dict[str, object], bool]:
    """Check the log without any experiment; print the findings, unless `--json` does at the end.

    Returns:
        The findings as JSON, and whether there are any.
    """
    from rlstreams.debug.evidence import opinion_text, text

    is_scan = steps == ALL
    redo = not is_scan or args.redo
    checked = _evidence(found_run, config, folders, steps, say, redo=redo)
    other = _opinion(args, found_run, config, steps, say)
    say("")
    if not args.json:
        name = str(found_run.folder)
        more = ["", *opinion_text.lines(other, name)] if other else []
        print("\n".join([*text.lines(checked, name, is_scan=is_scan), *more]))
    said = {"opinion": opinion_text.as_json(other)} if other else {}
    is_found = bool(checked.found or (other and other.differing))
    return {"evidence": text.as_json(checked), **said}, is_found


METRIC = "held_out (the reward of held-out rows), or one of a step: kl, entropy, grad_norm, ..."


@command(
    "bisect",
    "rlstreams replay bisect recordings/demo --metric held_out",
    "rlstreams replay bisect runs/demo --metric entropy --band 0.02:",
    of=REPLAY,
    takes=LOG,
)
@option("--metric", metavar="NAME", help=METRIC, default="")
@option(
    "--band",
    metavar="LOW:HIGH",
    help="what is usual, LOW: and :HIGH too; learnt: median and deviation of the steps before",
    default=LEARNT,
    show_default=True,
)
@option(
    "--redo",
    is_flag=True,
    help="check the weights too: do the steps again, score their samples again",
)
@judged_by
@option("--json", is_flag=True, help="print it as one JSON object")
@_looked_into
def bisect(args: Namespace) -> int:
    """the first step that contradicts its own log, and at which a metric left its band for good

    Compares what was trained with what was sampled, judges answers again, and checks log-probs and
    advantages; with --reward or --verifier also from which step on another grader differs.
    Between two evaluations it makes versions again and evaluates them, half way each time. Writes
    nothing. Exit status 0 also if there is no such step.
    """
    from rlstreams.debug.blame.band import band_of

    band = None if args.band == LEARNT else band_of(args.band)
    with _steps_of(args) as (found_run, config, folders):
        from rlstreams.debug.blame.bisect import bisect as bisected

        name, progress = str(found_run.folder), ProgressLine()
        report, _ = _checked_log(args, found_run, config, folders, ALL, progress)
        found = bisected(
            found_run.log, config, args.metric, band=band, checkpoints=folders, say=progress
        )
        progress("")
    if args.json:
        print_json({**report, **asdict(found), "blamed": found.blamed})
    else:
        print("\n".join(["", *found.lines(name)]))
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
@judged_by
@option("--experiments", is_flag=True, help="make them also where somebody is to blame already")
@option("--json", is_flag=True, help="print it as one JSON object")
@_looked_into
def blame(args: Namespace) -> int:
    """which samples of some steps contradict the log, or explain a change of a metric

    First checks what was sampled, judged, scored and trained against each other, and against the
    weights of the steps, done again; with --reward or --verifier also against what another grader
    says, which finds one that is wrong by its code. If all agrees, or with --experiments, it does
    the steps again without a set of samples, measures the metric behind them, and halves; random
    sets show how large an effect must be. Writes nothing. Exit status 0 also if it is nobody.
    """
    from rlstreams.debug.replay.player import range_of
    from rlstreams.words.spelling import spelling

    steps = range_of(args.steps)
    assert steps is not None, "it is required"
    with _steps_of(args) as (found_run, config, folders):
        progress = ProgressLine()
        report, is_found = _checked_log(args, found_run, config, folders, steps, progress)
        if is_found and not (args.experiments or args.rewards):
            if args.json:
                print_json(report)
            return 0
        from rlstreams.debug.blame.blame import blame as blamed
        from rlstreams.debug.blame.sets import rewards_of
        from rlstreams.debug.blame.text import lines

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
        print_json({**report, **asdict(found)})
    else:
        print("\n".join(["", *lines(found)]))
    return 0
