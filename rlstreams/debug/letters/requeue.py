"""Dead letters as they are read, which groups an operator may ask for again, and the request.

A request is a fact in `dead-letters`. `prompts` answers it with one new group of the same row that
names the old one in `replaces`, also where the letter was permanent or the row was replaced as
often as `prompts.max_replacements` says.
"""

from __future__ import annotations

import getpass
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rlstreams.debug.letters.view import LETTER_TOPICS, Fate, LettersView
from rlstreams.schemas.events import DeadLetter, ReplacementRequested
from rlstreams.streams.log.bus import Bus
from rlstreams.streams.log.codec import now_ms, outgoing
from rlstreams.streams.log.topics import DEAD_LETTERS
from rlstreams.streams.views.feed import Feed
from rlstreams.workers.loop.validation import is_group_number

TRANSACTIONAL_ID = "operator"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadLetters:
    """The fold at the end of its topics."""

    view: LettersView
    num_unreadable: int  # records in those topics that are no event


def read_letters(
    bus: Bus, deadline_s: float, keep_bytes: Callable[[DeadLetter], bool] = lambda _: False
) -> ReadLetters:
    """Read until where the topics end now.

    Raises:
        DeadlineError: the broker delivered nothing for `deadline_s`.
    """
    view = LettersView(keep_bytes)
    feed = Feed(bus, view, LETTER_TOPICS)
    try:
        feed.catch_up(deadline_s)
    finally:
        feed.close()
    return ReadLetters(view=view, num_unreadable=feed.num_unreadable)


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Groups to ask for, and why others cannot be."""

    groups: tuple[str, ...]
    refused: tuple[str, ...] = ()  # one sentence each


def select(view: LettersView, groups: Sequence[str], max_replacements: int) -> Selection:
    """Groups that were named one by one: each may be asked for, or is refused with the reason."""
    refused = {group: why_not(view, group, max_replacements) for group in groups}
    return Selection(
        groups=tuple(group for group, why in refused.items() if not why),
        refused=tuple(filter(None, refused.values())),
    )


def select_by_reason(view: LettersView, reason: str, max_replacements: int) -> Selection:
    """Every group that may be asked for and has a letter of that reason."""
    named = {
        letter.event.group_id
        for letter in view.letters
        if reason == letter.event.reason and is_group_number(letter.event.group_id)
    }
    return Selection(groups=select(view, sorted(named, key=int), max_replacements).groups)


def why_not(view: LettersView, group_id: str, max_replacements: int) -> str:
    """Why this group cannot be asked for; empty if it can."""
    state = view.group(group_id)
    dropped = state.dropped
    # A drop that could not name its row knows no count either: `prompts` may have given it up.
    is_automatic = (
        dropped is not None
        and not dropped.permanent
        and dropped.row >= 0
        and dropped.replacement < max_replacements
    )
    no_group = f"{group_id!r} is no training group: only those are issued again"
    refusals = {
        Fate.NOBODY: no_group,
        Fate.EVALUATION: no_group,
        Fate.UNKNOWN: f"group {group_id} was never issued",
        Fate.OPEN: f"group {group_id} is open: it can still be trained, or be dropped first",
        Fate.TRAINED: f"group {group_id} was trained: no group is trained twice",
        Fate.REPLACED: f"group {group_id} was replaced by group {state.replaced_by}",
        Fate.ASKED: f"group {group_id} was asked for before: prompts will answer",
    }
    if state.fate is Fate.DROPPED and is_automatic:
        return f"group {group_id} will be replaced by prompts without being asked for"
    return refusals.get(state.fate, "")


def _who() -> str:
    """The operator's name; in a container its number may have none."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # as of Python 3.13 the latter
        return f"uid {os.getuid()}"


def request(bus: Bus, run: str, groups: Sequence[str], reason: str) -> None:
    """Ask for these groups, all in one transaction.

    Raises:
        AbortedError, FencedError, OutcomeUnknownError: nothing, or perhaps nothing, was written.
    """
    events = [
        ReplacementRequested(run=run, group_id=group, by=_who(), reason=reason, at_ms=now_ms())
        for group in groups
    ]
    with bus.producer(TRANSACTIONAL_ID) as producer:
        producer.commit([outgoing(DEAD_LETTERS, event) for event in events])
