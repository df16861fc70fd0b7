"""How much may be in flight: pure folds of `steps`, and the limits derived from them.

Open groups are those issued minus those closed. Group numbers are dense, so the closed set is a
watermark and a few numbers, and every event of `steps` that closes groups carries all of it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from rlstreams.schemas.events import (
    NO_VERSION,
    ClosedGroups,
    DroppedGroup,
    Event,
    GroupsDropped,
    RedoDrifted,
    StepCompleted,
    TrainerStarted,
)
from rlstreams.streams.log.fencing import StepsGate


@dataclass(frozen=True, slots=True, kw_only=True)
class Replacement:
    """A dropped group whose row is to be issued again."""

    replaces: str
    row: int  # -1 (or none of the data): no event could name it; the group's own prompts do
    dataset_epoch: int
    replacement: int  # of the new group: how often the row was replaced, this time included


class Ledger:
    """What `steps` says: the newest claim, the newest version, what is closed, what was dropped.

    Which events count: `StepsGate`.
    """

    def __init__(self, max_replacements: int) -> None:
        self._max_replacements = max_replacements
        self._gate = StepsGate()
        self._claimed = False
        self._above: set[int] = set()
        self._dropped: dict[str, DroppedGroup] = {}
        self._asked: set[str] = set()
        self._due: set[str] = set()  # ever put into `to_replace`, and not given up
        self.watermark = 0  # every group below it is closed
        self.step_target = 0
        self.data_hash = ""  # of the training data, as the newest claim has it
        self.newest_version = NO_VERSION
        self.to_replace: deque[Replacement] = deque()  # oldest first; the issuer takes from it

    def apply(self, event: Event) -> None:
        """Fold one event in log order."""
        if not self._gate.admits(event):
            return
        if isinstance(event, TrainerStarted):
            self._claim(event)
        elif isinstance(event, StepCompleted | GroupsDropped | RedoDrifted):
            self._fold(event)

    def ask(self, group_id: str) -> None:
        """An operator wants this group's row once more, whatever the limits on replacing say.

        It counts once the group is dropped, before or after this call. A trained group is never
        issued again, and a group is replaced at most once.
        """
        self._asked.add(group_id)
        if group_id in self._dropped:
            self._replace(self._dropped[group_id])

    def may_replace(self, group_id: str, replacement: int, *, permanent: bool = False) -> bool:
        """Whether a dropped group, its row replaced `replacement` times so far, is issued again."""
        is_automatic = not permanent and replacement < self._max_replacements
        return is_automatic or group_id in self._asked

    def give_up(self, again: Replacement) -> None:
        """Do not replace this group, unless somebody asks for it later."""
        self.to_replace.remove(again)
        self._due.discard(again.replaces)

    @property
    def started(self) -> bool:
        """Whether a trainer claimed the run; before that nothing is known."""
        return self._claimed

    @property
    def last_step(self) -> int:
        """The newest completed step; 0 before the first."""
        return self._gate.last_step

    @property
    def target_reached(self) -> bool:
        """Whether the run has made all of its steps."""
        return self.started and self.last_step >= self.step_target

    @property
    def num_closed(self) -> int:
        """Closed training groups."""
        return self.watermark + len(self._above)

    @property
    def highest_closed(self) -> int:
        """The highest group number that is closed; -1 if none is."""
        return max(self._above, default=self.watermark - 1)

    def is_closed(self, number: int) -> bool:
        """Whether training group `number` is closed."""
        return number < self.watermark or number in self._above

    def room(self, num_issued: int, max_open: int, groups_per_step: int) -> int:
        """How many groups may be issued now.

        Open groups stay at or below `max_open`, and below what the steps that are left can use.
        """
        if not self.started:
            return 0
        usable = (self.step_target - self.last_step) * groups_per_step
        return max(0, min(max_open, usable) - (num_issued - self.num_closed))

    def _claim(self, event: TrainerStarted) -> None:
        self._claimed = True
        self.step_target = event.step_target
        self.data_hash = event.hashes.get("train", "")
        self.newest_version = max(self.newest_version, event.policy_version)

    def _fold(self, event: StepCompleted | GroupsDropped | RedoDrifted) -> None:
        if isinstance(event, GroupsDropped):
            self._close(event.closed)
            self._drop(event)
            return
        if isinstance(event, StepCompleted):
            self._close(event.closed)
        self.newest_version = max(self.newest_version, event.policy_version)

    def _close(self, closed: ClosedGroups) -> None:
        self.watermark = max(self.watermark, closed.watermark)
        self._above |= set(closed.above)
        self._above = {number for number in self._above if number >= self.watermark}

    def _drop(self, event: GroupsDropped) -> None:
        for group in event.groups:
            self._dropped.setdefault(group.group_id, group)
            if self.may_replace(group.group_id, group.replacement, permanent=group.permanent):
                self._replace(group)

    def _replace(self, group: DroppedGroup) -> None:
        if group.group_id in self._due:
            return
        self._due.add(group.group_id)
        self.to_replace.append(
            Replacement(
                replaces=group.group_id,
                row=group.row,
                dataset_epoch=group.dataset_epoch,
                replacement=group.replacement + 1,
            )
        )


def evaluation_due(ledger: Ledger, every: int, last: int) -> int | None:
    """The version to evaluate now, if one is due.

    Version 0, then every `every` versions (0: none), and the last one of the run. One that was
    passed by while nobody issued is left out: what is sampled now has newer weights.

    Args:
        last: the newest version whose evaluation was issued, or NO_VERSION.
    """
    if not ledger.started:
        return None
    due = ledger.newest_version
    if not ledger.target_reached:
        due -= due % every if every else due
    return due if due > last else None
