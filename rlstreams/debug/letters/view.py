"""Dead letters, the fates of their groups, and requests to issue their rows again.

Reads `dead-letters`, `steps` and `prompts`, in any order between the topics. A request is a fact in
`dead-letters`: `prompts` answers it with one new group of the same row that names the old one in
`replaces`, also where the dead letter was permanent or the row was replaced as often as
`prompts.max_replacements` says.
"""

from __future__ import annotations

import dataclasses
import getpass
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from rlstreams.schemas.events import (
    DeadLetter,
    DroppedGroup,
    Event,
    ReplacementRequested,
)
from rlstreams.streams.log.bus import Bus
from rlstreams.streams.log.codec import now_ms, outgoing
from rlstreams.streams.log.group_ids import issue_number, sample_name
from rlstreams.streams.log.record import Position
from rlstreams.streams.log.topics import DEAD_LETTERS, PROMPTS, STEPS, Topic
from rlstreams.streams.samples.fold import Samples
from rlstreams.streams.samples.life import Group
from rlstreams.streams.views.feed import Feed
from rlstreams.workers.loop.validation import is_group_number

LETTER_TOPICS: tuple[Topic, ...] = (STEPS, PROMPTS, DEAD_LETTERS)


class Fate(StrEnum):
    """The fate of a group."""

    NOBODY = "no group"  # the dead letter names no sample of this run
    EVALUATION = "evaluation"  # held-out samples belong to no group that closes
    UNKNOWN = "never issued"
    OPEN = "open"
    TRAINED = "trained"
    DROPPED = "dropped"
    ASKED = "asked for"  # dropped, and a request for a replacing group is not answered yet
    REPLACED = "replaced"


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupState:
    """One group as operators see it."""

    group_id: str
    fate: Fate
    replaced_by: str = ""
    dropped: DroppedGroup | None = None

    def __str__(self) -> str:
        if self.fate is Fate.REPLACED:
            return f"replaced by {self.replaced_by}"
        if self.fate is Fate.DROPPED and self.dropped is not None:
            return f"dropped: {self.dropped.reason}"
        return str(self.fate)


@dataclass(frozen=True, slots=True, kw_only=True)
class Letter:
    """A dead letter; the bytes in `event.value` only if they were asked for."""

    event: DeadLetter
    num_bytes: int

    @property
    def origin(self) -> str:
        """`TOPIC-PARTITION@OFFSET`."""
        event = self.event
        return f"{event.origin_topic}-{event.origin_partition}@{event.origin_offset}"

    @property
    def sample(self) -> str:
        """`GROUP/SAMPLE`; `-` where the record names none."""
        return sample_name(self.event) if self.event.group_id else "-"


class LettersView:
    """Dead letters, and the state of their groups by `Samples`.

    Args:
        keep_bytes: whether to keep a dead letter's bytes of its origin; by default never.
    """

    def __init__(self, keep_bytes: Callable[[DeadLetter], bool] = lambda _: False) -> None:
        self._keep_bytes = keep_bytes
        self._samples = Samples()
        self.ledger = self._samples.ledger
        self.letters: list[Letter] = []  # in the log's order
        self.num_unreadable = 0  # records in those topics that are no event

    def apply(self, event: Event, position: Position | None = None) -> None:
        """Take one event; events about neither dead letters nor groups change nothing."""
        self._samples.apply(event, position)
        if isinstance(event, DeadLetter):
            self._letter(event)

    def group(self, group_id: str) -> GroupState:
        """Return the state of a group, as far as was read."""
        number = issue_number(group_id)
        if number is None:
            fate = Fate.EVALUATION if group_id.startswith("e") else Fate.NOBODY
            return GroupState(group_id=group_id, fate=fate)
        found = self._samples.groups.get(group_id) or Group(group_id, number)
        return GroupState(
            group_id=group_id,
            fate=self._fate(found, number),
            replaced_by=found.replaced_by,
            dropped=found.dropped,
        )

    def _fate(self, group: Group, number: int) -> Fate:
        if group.replaced_by:
            return Fate.REPLACED
        if group.dropped is not None:
            return Fate.ASKED if group.is_asked else Fate.DROPPED
        if self.ledger.is_closed(number):
            return Fate.TRAINED
        return Fate.OPEN if number <= self._samples.last_group else Fate.UNKNOWN

    def _letter(self, event: DeadLetter) -> None:
        num_bytes = len(event.value)
        if not self._keep_bytes(event):
            event = dataclasses.replace(event, value=b"")
        self.letters.append(Letter(event=event, num_bytes=num_bytes))


TRANSACTIONAL_ID = "operator"


def read_letters(
    bus: Bus, deadline_s: float, keep_bytes: Callable[[DeadLetter], bool] = lambda _: False
) -> LettersView:
    """Read dead letters and their groups up to the topics' present ends.

    Raises DeadlineError: the broker delivered nothing for `deadline_s`.
    """
    view = LettersView(keep_bytes)
    feed = Feed(bus, view, LETTER_TOPICS)
    try:
        feed.catch_up(deadline_s)
    finally:
        feed.close()
    view.num_unreadable = feed.num_unreadable
    return view


def select(
    view: LettersView, groups: Sequence[str], max_replacements: int
) -> tuple[list[str], list[str]]:
    """Return the groups that may be requested, and for each other group a sentence why not."""
    refused = {group: why_not(view, group, max_replacements) for group in groups}
    groups = [group for group, why in refused.items() if not why]
    return groups, [why for why in refused.values() if why]


def select_by_reason(view: LettersView, reason: str, max_replacements: int) -> list[str]:
    """Return every group that may be requested and has a dead letter of that reason."""
    named = {
        letter.event.group_id
        for letter in view.letters
        if reason == letter.event.reason and is_group_number(letter.event.group_id)
    }
    return select(view, sorted(named, key=int), max_replacements)[0]


def why_not(view: LettersView, group_id: str, max_replacements: int) -> str:
    """Return why this group cannot be requested; "": it can."""
    state = view.group(group_id)
    dropped = state.dropped
    # A drop without a row has no count of replacements either: `prompts` may have given it up.
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


def _operator() -> str:
    """Return the operator's name; `uid N` where a container has no name for the number."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # OSError as of Python 3.13
        return f"uid {os.getuid()}"


def request(bus: Bus, run: str, groups: Sequence[str], reason: str) -> None:
    """Request these groups, all in one transaction.

    Raises AbortedError, FencedError, OutcomeUnknownError: nothing, or perhaps nothing, was written.
    """
    events = [
        ReplacementRequested(run=run, group_id=group, by=_operator(), reason=reason, at_ms=now_ms())
        for group in groups
    ]
    with bus.producer(TRANSACTIONAL_ID) as producer:
        producer.commit([outgoing(DEAD_LETTERS, event) for event in events])
