"""View of dead letters: each one, and what became of its group.

Folds `dead-letters`, `steps` and `prompts`, in any order between the topics.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from rlstreams.schemas.events import (
    TRAIN,
    DeadLetter,
    DroppedGroup,
    Event,
    GroupsDropped,
    Prompt,
    ReplacementRequested,
)
from rlstreams.streams.ledger import Ledger
from rlstreams.streams.log.group_ids import issue_number
from rlstreams.streams.log.record import Position
from rlstreams.streams.log.topics import DEAD_LETTERS, PROMPTS, STEPS, Topic

LETTER_TOPICS: tuple[Topic, ...] = (STEPS, PROMPTS, DEAD_LETTERS)


class Fate(StrEnum):
    """What became of a group."""

    NOBODY = "no group"  # the letter names no sample of this run
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
        """`GROUP/SAMPLE`; `-` where nobody knows."""
        return f"{self.event.group_id}/{self.event.sample}" if self.event.group_id else "-"


class LettersView:
    """The fold.

    Args:
        keep_bytes: of which letters to keep the origin's bytes; by default of none.
    """

    def __init__(self, keep_bytes: Callable[[DeadLetter], bool] = lambda _: False) -> None:
        self._keep_bytes = keep_bytes
        self.ledger = Ledger(begins_anywhere=True, on_drop=self._drop)
        self._dropped: dict[str, DroppedGroup] = {}
        self._replaced_by: dict[str, str] = {}
        self._asked: set[str] = set()
        self._highest = -1  # group issued
        self.letters: list[Letter] = []  # in the log's order

    def apply(self, event: Event) -> None:
        """Take one event; what is about no letter and no group is passed by."""
        if isinstance(event, DeadLetter):
            self._letter(event)
        elif isinstance(event, ReplacementRequested):
            self._asked.add(event.group_id)
        elif isinstance(event, Prompt):
            self._prompt(event)
        else:
            self.ledger.apply(event)

    @property
    def dropped_groups(self) -> tuple[str, ...]:
        """All groups that closed without being trained, lowest number first."""
        return tuple(sorted(self._dropped, key=int))

    def group(self, group_id: str) -> GroupState:
        """What became of a group, as far as was read."""
        fate = Fate.EVALUATION if group_id.startswith("e") else Fate.NOBODY
        if (number := issue_number(group_id)) is not None:
            fate = self._fate(group_id, number)
        return GroupState(
            group_id=group_id,
            fate=fate,
            replaced_by=self._replaced_by.get(group_id, ""),
            dropped=self._dropped.get(group_id),
        )

    def _fate(self, group_id: str, number: int) -> Fate:
        if group_id in self._replaced_by:
            return Fate.REPLACED
        if group_id in self._dropped:
            return Fate.ASKED if group_id in self._asked else Fate.DROPPED
        if self.ledger.is_closed(number):
            return Fate.TRAINED
        return Fate.OPEN if number <= self._highest else Fate.UNKNOWN

    def _letter(self, event: DeadLetter) -> None:
        num_bytes = len(event.value)
        if not self._keep_bytes(event):
            event = dataclasses.replace(event, value=b"")
        self.letters.append(Letter(event=event, num_bytes=num_bytes))

    def _prompt(self, event: Prompt) -> None:
        number = issue_number(event.group_id)
        if event.purpose != TRAIN or number is None:
            return
        self._highest = max(self._highest, number)
        if event.replaces is not None:
            self._replaced_by.setdefault(event.replaces, event.group_id)

    def _drop(self, event: GroupsDropped, _: Position) -> None:
        for group in event.groups:
            self._dropped.setdefault(group.group_id, group)
