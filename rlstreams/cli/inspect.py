"""`rlstreams inspect [GROUP/SAMPLE|GROUP] CONFIG`: trajectories and their whole lineage."""

from __future__ import annotations

import re
import shlex
import sys
from argparse import Namespace
from collections.abc import Container, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rlstreams.cli.named import opened
from rlstreams.cli.options import LOG, N, Takes, command, one_of, option
from rlstreams.streams.log.errors import ConfigError

if TYPE_CHECKING:
    from rlstreams.streams.lineage.fold import Lineage
    from rlstreams.streams.run.run_log import RunLog
    from rlstreams.streams.sessions.session import Session
    from rlstreams.words.sample_detail import SampleDetail
    from rlstreams.words.spelling import Spelling

_SAMPLE = re.compile(r"(\d+|e\d+-\d+)/\d+")
_GROUP = re.compile(r"\d+|e\d+-\d+")
_ALMOST = re.compile(r"(\d+|e\d+-\d+)[-_:.,](\d+)")
_PIPE_WIDTH = 160
_AT_ONCE = 1000  # samples that become text between two looks


@command(
    "inspect",
    "rlstreams inspect runs/demo",
    "rlstreams inspect 12/3 runs/demo",
    "rlstreams inspect 12 runs/demo",
    'rlstreams inspect runs/demo --text "so the answer is" --worst reward',
    "rlstreams inspect recordings/demo --worst reward --step 8",
    takes=Takes(
        "SAMPLE | RUN", f"SAMPLE: 12/3, or 12 for all samples of group 12; RUN: {LOG.about}"
    ),
)
@option("--step", type=N, help="only samples that step N trained on")
@option("--limit", type=N, help="list at most so many", default=10, show_default=True)
@option(
    "--worst",
    type=one_of("mismatch", "reward", "staleness", "tokens", "duration"),
    help="list the worst first",
)
@option(
    "--text",
    metavar="WORDS",
    help="only samples whose prompt, answer or reward's note has these words",
    default="",
)
@option("--full", is_flag=True, help="show each listed sample in full, not as a line")
@option("--receipt", is_flag=True, help="of each: what made its tokens, and how that is known")
@option("--json", is_flag=True, help="receipts as JSON, a line each")
@option("--tokenizer", metavar="DIR", help="where tokenizer.json is, if it has moved", default="")
def run(args: Namespace) -> int:
    """answers of a run to read: one with its tokens and whole lineage, a group, the worst ones

    Follows a sample from its prompt through attempts, segments, scores and step to the version
    that it contributed to; shows the answers of a group side by side. Without a sample, lists
    prompt, answer and reward of the worst ones by some measure: by default the mismatch of engine
    and trainer.
    """
    from rlstreams.words.sample_detail import sample_detail
    from rlstreams.words.spelling import spelling

    _check_names(args.config.names)
    wanted = [w for w in args.config.names if _SAMPLE.fullmatch(w) or _GROUP.fullmatch(w)]
    names = [w for w in args.config.names if w not in wanted]
    with opened(names, args.config.overrides) as source:
        log, spelled = source.log, spelling(args.tokenizer, source.model_path)
        details = [sample_detail(one, spelled) for one in _lineages(log, args, wanted, spelled)]
        is_whole = bool(details) and (args.full or len(details) == 1)
        sessions = log.sessions(*(str(one.lineage.sample) for one in details)) if is_whole else []
        name, num_unreadable, problems = log.name, log.num_unreadable, log.problems
    for problem in problems:
        print(f"{name}: {problem}", file=sys.stderr)
    if num_unreadable:
        print(f"{name}: records that could not be decoded: {num_unreadable}", file=sys.stderr)
    known = [one for one in details if one.stages]
    shown = [str(one.lineage.sample) for one in known]
    missing = [one for one in wanted if not any(f"{name}/".startswith(f"{one}/") for name in shown)]
    if missing:
        listing = " ".join(["rlstreams inspect", *names])
        print(f"{name} has no {', '.join(missing)}; `{listing}` lists some", file=sys.stderr)
    elif not known:
        print(f"no sample of {name} matches", file=sys.stderr)
    if not known:
        return 1
    if args.receipt or args.json:
        return _receipts(known, as_json=args.json) or int(bool(missing))
    is_group = len(wanted) == 1 and len(known) > 1
    _show(known, args, _title(name, args, wanted), is_group=is_group)
    _show_sessions(sessions, spelled, is_full=args.full)
    return 1 if missing else 0


def _receipts(details: Sequence[SampleDetail], *, as_json: bool) -> int:
    """Print the samples' receipts; 1 if one does not fit."""
    from rlstreams.streams.lineage.receipt import receipt
    from rlstreams.streams.log.text import plain_json
    from rlstreams.words.receipt_text import receipt_lines
    from rlstreams.words.screen import visible

    found = [receipt(detail.lineage) for detail in details]
    for one in found:
        lines = [plain_json(one.as_json())] if as_json else map(visible, receipt_lines(one))
        print("\n".join(lines))
    return int(not all(one.is_proven for one in found))


def _show_sessions(sessions: Sequence[Session], spelled: Spelling, *, is_full: bool) -> None:
    from rlstreams.streams.sessions.figures import session_figures
    from rlstreams.words.dialogue import words_of
    from rlstreams.words.screen import visible
    from rlstreams.words.session_text import session_lines

    for session in sessions:
        print()
        for line in session_lines(session_figures(session, words_of(spelled)), is_full=is_full):
            print(visible(line))


def _lineages(
    log: RunLog, args: Namespace, wanted: Sequence[str], spelled: Spelling
) -> list[Lineage]:
    if wanted and (args.worst or args.text or args.step is not None):
        raise ConfigError("name samples, or rank them by --worst, --step or --text")
    found = wanted
    if args.text:
        among = _saying(log, args.text, spelled)
        by = args.worst or ("" if args.step else "reward")
        ranked = worst(log, by, args.step, len(among) or 1, among)
        found = ranked[: args.limit]
    elif not wanted:
        found = worst(log, args.worst, args.step, args.limit)
    return log.samples(*found) if found else []


def _saying(log: RunLog, words: str, spelled: Spelling) -> set[str]:
    """Return names of the samples whose prompt, answer or note has these words."""
    from rlstreams.schemas.events import Trajectory
    from rlstreams.streams.log.topics import TRAJECTORIES
    from rlstreams.words.texts import Texts

    texts = Texts(lambda: spelled)
    for record in log.read_topic(TRAJECTORIES, skip_unreadable=True):
        if isinstance(record.event, Trajectory):
            texts.add(record.event)
    while texts.spell(_AT_ONCE):
        pass
    return texts.find(words)


def worst(
    log: RunLog, measure: str | None, step: int | None, limit: int, among: Container[str] = ()
) -> list[str]:
    """Return names of samples, the worst first, training samples before held-out ones.

    For a step without a measure, the samples of its batch, in order.

    Args:
        among: names to choose from; empty: all.

    Raises:
        ConfigError: a step that the log does not have; names the steps that it has.
        DeadlineError: a partition did not deliver up to its end.
    """
    from rlstreams.schemas.events import TRAIN
    from rlstreams.show.report.rows import Wanted, find, of_step
    from rlstreams.streams.log.topics import SCORED, STEPS, TRAJECTORIES
    from rlstreams.streams.samples.fold import ALL, Samples

    samples, numbers = Samples(keeps=ALL), [event.step for event in log.steps()]
    if step is not None and step not in numbers:
        there = f"it has steps {numbers[0]} to {numbers[-1]}" if numbers else "it has no step"
        raise ConfigError(f"step {step} is not in {log.name}: {there}")
    by = measure or ("mismatch" if step is None else "")
    for topic in (STEPS, SCORED if by == "mismatch" else TRAJECTORIES):
        for record in log.read_topic(topic, skip_unreadable=True):
            samples.apply(record.event, record.position)
    if not by:
        batch = [row.name for row in of_step(samples, step or 0)]
        return [name for name in batch if not among or name in among][:limit]
    ranked = find(samples, Wanted(sort=by, ascending=by == "reward", step=step))
    ranked.sort(key=lambda row: row.purpose != TRAIN)
    known = [row.name for row in ranked if getattr(row, by) is not None]
    return [name for name in known if not among or name in among][:limit]


def _title(name: str, args: Namespace, wanted: Sequence[str]) -> str:
    if wanted:
        return f"{name}: {', '.join(wanted)}"
    parts = [f"step {args.step}"] if args.step is not None else []
    if args.text:
        parts.append(f"with {args.text!r}")
    if args.worst or not parts:
        parts.append(f"worst by {args.worst or 'mismatch'}")
    return f"{name}: {', '.join(parts)}"


def _show(details: Sequence[SampleDetail], args: Namespace, title: str, *, is_group: bool) -> None:
    from rich.console import Console

    from rlstreams.debug.inspect.terminal import siblings, table, whole

    width = None if sys.stdout.isatty() else _PIPE_WIDTH
    console = Console(width=width, markup=False, emoji=False, highlight=False)
    if args.full or len(details) == 1:
        for detail in details:
            console.print(whole(detail, console.width))
        return
    if is_group:
        console.print(siblings(details, title, console.width))
    else:
        console.print(table(details, title, console.width))
    first = details[0].lineage.sample
    where = shlex.join(
        w for w in args.config.names if not _SAMPLE.fullmatch(w) and not _GROUP.fullmatch(w)
    )
    console.print(f"\nall of one: rlstreams inspect {first} {where}", style="bright_black")


def _check_names(names: Sequence[str]) -> None:
    for name in names:
        almost = None if _GROUP.fullmatch(name) or Path(name).exists() else _ALMOST.fullmatch(name)
        if almost:
            raise ConfigError(f"{name}: a sample is written {almost[1]}/{almost[2]}")
