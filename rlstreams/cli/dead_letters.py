"""`rlstreams dead-letters list|show|requeue`: samples set aside, and requests to retry them."""

from __future__ import annotations

import re
import sys
from argparse import Namespace
from typing import TYPE_CHECKING

import click

from rlstreams.cli.named import configuration, opened_run
from rlstreams.cli.options import RUN, CommandGroup, Takes, argument, command, option
from rlstreams.streams.log.errors import ConfigError
from rlstreams.streams.log.group_ids import sample_name
from rlstreams.streams.log.text import counted

if TYPE_CHECKING:
    from rlstreams.debug.letters.view import LettersView
    from rlstreams.schemas.events import DeadLetter

_LETTER = re.compile(r"(\d+|e\d+-\d+)/\d+|[a-z-]+(-\d+|\[\d+\])@\d+")
_GROUP = re.compile(r"\d+|e\d+-\d+")


DEAD_LETTERS = CommandGroup(
    "dead-letters",
    "list dead letters, show one, requeue its group",
    "A record or sample that could not be handled goes to the topic dead-letters, with its bytes "
    "and their origin; its group is closed, and usually replaced.",
)


@command(
    "list",
    "rlstreams dead-letters list runs/demo",
    "rlstreams dead-letters list runs/demo --reason reward --json",
    of=DEAD_LETTERS,
    takes=RUN,
)
@option("--reason", metavar="REASON", help="only this reason: decode, reward, ...", default="")
@option("--json", is_flag=True, help="one JSON object a line")
def run_list(args: Namespace) -> int:
    """one line per dead letter, and totals by reason"""
    import shutil

    from rlstreams.debug.letters.text import json_line, table
    from rlstreams.debug.letters.view import read_letters

    config = configuration(*args.config)
    with opened_run(config) as log:
        view = read_letters(log.bus, config.deadlines.commit_s)
    letters = [letter for letter in view.letters if args.reason in ("", letter.event.reason)]
    if args.json:
        for letter in letters:
            print(json_line(view, letter))
        return 0
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 0
    print(table(view, letters, width))
    _print_unreadable(view)
    return 0


def _letter(_: click.Context, __: click.Parameter, word: str) -> str:
    """Refuse what is none, before a run is looked for: it may be the run."""
    if not _LETTER.fullmatch(word):
        raise ConfigError(
            "show takes one GROUP/SAMPLE or TOPIC-PARTITION@OFFSET, like 17/3 or "
            f"trajectories-0@41, got {word}; `rlstreams dead-letters list` has them"
        )
    return word


@command(
    "show",
    "rlstreams dead-letters show 17/3 runs/demo",
    "rlstreams dead-letters show trajectories-0@41 runs/demo",
    of=DEAD_LETTERS,
    takes=RUN,
)
@argument(
    "LETTER",
    "by its sample or its record's offset: GROUP/SAMPLE or TOPIC-PARTITION@OFFSET",
    callback=_letter,
)
def run_show(args: Namespace) -> int:
    """show one dead letter in full, its record decoded if possible"""
    from rlstreams.debug.letters.text import whole
    from rlstreams.debug.letters.view import read_letters

    name = args.letter.replace("[", "-").replace("]", "")

    def is_wanted(event: DeadLetter) -> bool:
        place = f"{event.origin_topic}-{event.origin_partition}@{event.origin_offset}"
        return name in (place, sample_name(event))

    config = configuration(*args.config)
    with opened_run(config) as log:
        view = read_letters(log.bus, config.deadlines.commit_s, keep_bytes=is_wanted)
        letters = [letter for letter in view.letters if is_wanted(letter.event)]
        shown = [whole(view, letter, log.bus.schemas()) for letter in letters]
    print("\n\n".join(shown) or f"no dead letter of {args.letter}")
    if not shown:
        _print_unreadable(view)
    return 0 if shown else 1


def _print_unreadable(view: LettersView) -> None:
    if view.num_unreadable:
        print(f"{counted(view.num_unreadable, 'record')} in these topics could not be decoded")


@command(
    "requeue",
    "rlstreams dead-letters requeue 17 21 runs/demo",
    "rlstreams dead-letters requeue --reason reward runs/demo",
    of=DEAD_LETTERS,
    takes=Takes("GROUP | RUN", f"GROUP: number of a dropped group; RUN: {RUN.about}"),
)
@option("--reason", metavar="REASON", help="each dropped group with such a dead letter", default="")
def run_requeue(args: Namespace) -> int:
    """request another group for the same row

    Exit status 0 only if every group named can be requeued; otherwise nothing is written.
    """
    from rlstreams.debug.letters.view import read_letters, request, select, select_by_reason

    groups = [w for w in args.config.names if _GROUP.fullmatch(w)]
    if bool(groups) == bool(args.reason):
        raise ConfigError("requeue takes groups by number, or --reason: one of the two")
    config = configuration([w for w in args.config.names if w not in groups], args.config.overrides)
    limit = config.prompts.max_replacements
    with opened_run(config) as log:
        view = read_letters(log.bus, config.deadlines.commit_s)
        chosen, refused = (
            select(view, groups, limit)
            if groups
            else (select_by_reason(view, args.reason, limit), [])
        )
        for sentence in refused:
            print(sentence, file=sys.stderr)
        if refused or not chosen:
            print("nothing was requested", file=sys.stderr)
            return 1
        request(log.bus, config.run.id, chosen, args.reason or "asked by number")
    print(f"requested {counted(len(chosen), 'group')} again: {', '.join(chosen)}")
    if view.ledger.at_target:
        target = view.ledger.step_target
        print(
            f"the run has made its {target} steps: nobody will answer until it is "
            f"resumed with more, `rlstreams up ... --resume --steps {target + 1}`"
        )
    return 0
