"""Which dropped groups are issued again: those named in `steps`, and those operators request.

A request is served at most once, across restarts too: the replacement group names the dropped one
in `replaces`, so the topic `prompts` itself records which requests were served.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import replace

from rlstreams.schemas.events import DroppedGroup, GroupsDropped, ReplacementRequested
from rlstreams.streams.log.bus import Bus
from rlstreams.streams.log.record import Position
from rlstreams.streams.log.topics import DEAD_LETTERS, PROMPTS
from rlstreams.workers.loop.foreign import ForeignRecords
from rlstreams.workers.prompts.issue import PlannedGroup
from rlstreams.workers.prompts.issued import find_prompt

MAX_POLL = 100


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


class Replacements:
    """Reads requests, and plans the groups that replace dropped ones.

    Args:
        run: requests of another run are passed by.
        num_rows: of the training data; a drop may name a row beyond it, from a stranger's record.
        deadline_s: longest silence of the broker while a group's row is looked up.
    """

    def __init__(
        self,
        bus: Bus,
        run: str,
        dropped: DroppedGroups,
        foreign: ForeignRecords,
        *,
        num_rows: int,
        deadline_s: float,
    ) -> None:
        self._bus = bus
        self._run = run
        self._dropped = dropped
        self._foreign = foreign
        self._rows = range(num_rows)
        self._deadline_s = deadline_s
        self._num_partitions = bus.partitions(PROMPTS.name)
        self._reader = bus.reader(bus.beginnings(DEAD_LETTERS.name))
        self._history = bus.ends(DEAD_LETTERS.name)

    def poll(self) -> None:
        """Take note of what operators asked for since; never waits."""
        for record in self._foreign.readable(self._reader.poll(MAX_POLL, 0.0)):
            event = record.event
            if isinstance(event, ReplacementRequested) and event.run == self._run:
                self._dropped.ask(event.group_id)

    @property
    def history_read(self) -> bool:
        """Whether all that was asked for before this start is known."""
        now = self._reader.positions()
        return all(now.get(partition, 0) >= end for partition, end in self._history.items())

    def planned(self, numbers: Sequence[int], replaced: Collection[str]) -> list[PlannedGroup]:
        """The groups to issue under the first of `numbers`, oldest drop first.

        Args:
            replaced: groups that have a replacement already.
        """
        due = self._dropped.to_replace
        for again in [again for again in due if again.replaces in replaced]:
            due.remove(again)
        groups: list[PlannedGroup] = []
        for again in list(due):
            if len(groups) == len(numbers):
                break
            known = again if again.row in self._rows else self._look_up(again)
            if known is not None:
                groups.append(replace(known, number=numbers[len(groups)]))
        return groups

    def close(self) -> None:
        """Release the reader."""
        self._reader.close()

    def _look_up(self, again: PlannedGroup) -> PlannedGroup | None:
        """What a drop that names none of our rows could not say; None: it is given up.

        How often the row was replaced is known from here on only, and so is held to the maximum.
        """
        due, group_id = self._dropped.to_replace, str(again.replaces)
        prompt = find_prompt(self._bus, group_id, self._num_partitions, self._deadline_s)
        if prompt is None or prompt.row not in self._rows:
            self._foreign.log.warning("no_row_to_replace", group_id=group_id)
        elif self._dropped.may_replace(group_id, prompt.replacement):
            known = due[due.index(again)] = replace(
                again,
                row=prompt.row,
                dataset_epoch=prompt.dataset_epoch,
                replacement=prompt.replacement + 1,
            )
            return known
        self._dropped.give_up(again)
        return None
