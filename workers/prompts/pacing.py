"""How much may be in flight, and which dropped groups are issued again: limits of the ledger. Pure.

Open groups are those issued minus those closed. Group numbers are dense, so the closed set is a
watermark and a few numbers, and every event of `steps` that closes groups carries all of it.
"""

from __future__ import annotations

from collections import deque

from rlstreams.schemas.events import DroppedGroup, GroupsDropped
from rlstreams.streams.ledger import Ledger
from rlstreams.streams.log.record import Position
from rlstreams.workers.prompts.issue import PlannedGroup


class DroppedGroups:
    """The groups that were dropped, and those of them that are to be replaced.

    Args:
        max_replacements: of one row, without an operator's request.
    """

    def __init__(self, max_replacements: int) -> None:
        self._max_replacements = max_replacements
        self._dropped: dict[str, DroppedGroup] = {}
        self._asked: set[str] = set()
        self._due: set[str] = set()  # ever put into `to_replace`, and not given up
        self.to_replace: deque[PlannedGroup] = deque()  # oldest first; the issuer takes from it

    def add(self, event: GroupsDropped, _: Position) -> None:
        """The ledger's `on_drop`."""
        for group in event.groups:
            self._dropped.setdefault(group.group_id, group)
            if self.may_replace(group.group_id, group.replacement, permanent=group.permanent):
                self._replace(group)

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

    def give_up(self, again: PlannedGroup) -> None:
        """Do not replace this group, unless somebody asks for it later."""
        self.to_replace.remove(again)
        self._due.discard(again.replaces or "")

    def _replace(self, group: DroppedGroup) -> None:
        if group.group_id in self._due:
            return
        self._due.add(group.group_id)
        self.to_replace.append(
            PlannedGroup(
                replaces=group.group_id,
                row=group.row,
                dataset_epoch=group.dataset_epoch,
                replacement=group.replacement + 1,
            )
        )


def room(ledger: Ledger, num_issued: int, max_open: int, groups_per_step: int) -> int:
    """How many groups may be issued now; none before the first claim.

    Open groups stay at or below `max_open`, and below what the steps that are left can use.
    """
    usable = (ledger.step_target - ledger.last_step) * groups_per_step
    return max(0, min(max_open, usable) - (num_issued - ledger.num_closed))


def evaluation_due(ledger: Ledger, every: int, last: int) -> int | None:
    """The version to evaluate now, if one is due.

    Version 0, then every `every` versions (0: none), and the last one of the run. One that was
    passed by while nobody issued is left out: what is sampled now has newer weights.

    Args:
        last: the newest version whose evaluation was issued, or NO_VERSION.
    """
    if ledger.claim is None:
        return None
    due = ledger.policy_version
    if not ledger.at_target:
        due -= due % every if every else due
    return due if due > last else None
