"""`rlstreams replay judge | branch`: answers judged again, and a run continued from a step."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from rlstreams.cli.named import opened, print_json
from rlstreams.cli.options import LOG, SETTING, N, command, option, set_threads
from rlstreams.cli.replay.group import REPLAY, config_of, judged_by, spelled_for_grader, trusts
from rlstreams.streams.log.errors import ConfigError


@command(
    "judge",
    "rlstreams replay judge runs/demo --reward stricter.py:reward",
    "rlstreams replay judge recordings/demo --verifier numeric --option tolerance=0.01",
    "rlstreams replay judge runs/demo",
    of=REPLAY,
    takes=LOG,
)
@judged_by
@trusts
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
    from rlstreams.workers.config.across import judging

    with opened(*args.config) as found_run:
        config = config_of(found_run, is_trusted=args.trust_code)
        log = found_run.log
        spelled = spelled_for_grader(args.tokenizer, found_run.model_path, "--tokenizer")
        section = judging(config)
        with grader_of(section, args.reward, args.verifier, args.option) as grader:
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
    type=SETTING,
    multiple=True,
    help="what the branch does otherwise; what --resume refuses cannot change here either",
)
@option("--as", "as_", metavar="RUN_ID", help="its id (the parent's and -at-STEP)", default="")
@option("--dir", metavar="DIR", help="its folder (runs/RUN_ID)", default="")
@option("--checkpoints", metavar="DIR", multiple=True, help="of the parent: also look here")
@trusts
def branch(args: Namespace) -> int:
    """make a run that goes on from another one's state behind a step

    Loads the parent's checkpoint of that step, or redoes the steps since the one before, and
    compares each hash. Copies no record: the branch holds where its parent stood, and a
    checkpoint. `rlstreams up DIR` runs it.
    """
    from rlstreams.streams.run.places import CHECKPOINTS, check_folder_of

    for name in args.checkpoints:
        check_folder_of(CHECKPOINTS, name, "--checkpoints")
    with opened(*args.config) as parent:
        config = config_of(parent, is_trusted=args.trust_code)
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
