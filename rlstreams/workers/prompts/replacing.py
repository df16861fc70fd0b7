"""Dropped groups that are issued again: those named in `steps`, and those operators request.

A request is served at most once, across restarts too: the replacement group names the dropped one
in `replaces`, so the topic `prompts` itself records which requests were served.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace

from rlstreams.schemas.events import (
    DroppedGroup,
    GroupsDropped,
    ReplacementRequested,
    RunBranched,
)
from rlstreams.streams.log.bus import Bus
from rlstreams.streams.log.record import Position
from rlstreams.streams.log.topics import DEAD_LETTERS
from rlstreams.workers.loop.foreign import EventReader
from rlstreams.workers.prompts.issue import PlannedGroup

MAX_POLL = 100


class DroppedGroups:
    """The groups that were dropped, and those of them that are to be replaced.

    Args:
        max_replacements: of one row, without an operator's request.
        num_rows: of the training data.
        refused: called with a group whose drop names no row: only damaged or foreign records of it
            were read. It is not replaced.
    """

    def __init__(
        self, max_replacements: int, num_rows: int, refused: Callable[[str], None]
    ) -> None:
        self._max_replacements = max_replacements
        self._rows = range(num_rows)
        self._refused = refused
        self._dropped: dict[str, DroppedGroup] = {}
        self._asked: set[str] = set()
        self._due: set[str] = set()  # ever put into `to_replace`
        self.to_replace: deque[PlannedGroup] = deque()  # oldest first; the issuer takes from it

    def add(self, event: GroupsDropped, _: Position) -> None:
        """The ledger's `on_drop`."""
        self._add(event.groups)

    def take_over(self, event: RunBranched, _: Position) -> None:
        """The ledger's `on_branch`: adds groups that the parent dropped and did not replace."""
        self._add(event.dropped)

    def _add(self, groups: Iterable[DroppedGroup]) -> None:
        for group in groups:
            self._dropped.setdefault(group.group_id, group)
            is_automatic = not group.permanent and group.replacement < self._max_replacements
            if is_automatic or group.group_id in self._asked:
                self._replace(group)

    def ask(self, group_id: str) -> None:
        """Replace a group at an operator's request, whatever the limits on replacing.

        It counts once the group is dropped, before or after this call. A trained group is never
        issued again, and a group is replaced at most once.
        """
        self._asked.add(group_id)
        if group_id in self._dropped:
            self._replace(self._dropped[group_id])

    def _replace(self, group: DroppedGroup) -> None:
        if group.group_id in self._due:
            return
        if group.row not in self._rows:
            self._refused(group.group_id)
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
    """

    def __init__(self, bus: Bus, run: str, dropped: DroppedGroups) -> None:
        self._run = run
        self._dropped = dropped
        self._reader = EventReader(bus, bus.beginnings(DEAD_LETTERS.name), DEAD_LETTERS.name)
        self._history = bus.ends(DEAD_LETTERS.name)

    def poll(self) -> None:
        """Note the new requests of operators; never waits."""
        for record in self._reader.poll(MAX_POLL):
            event = record.event
            if isinstance(event, ReplacementRequested) and event.run == self._run:
                self._dropped.ask(event.group_id)

    @property
    def history_read(self) -> bool:
        """Whether all requests from before this start were read."""
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
        return [replace(again, number=n) for again, n in zip(due, numbers, strict=False)]

    def close(self) -> None:
        """Release the reader."""
        self._reader.close()
