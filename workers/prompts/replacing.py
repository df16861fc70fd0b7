"""Which dropped groups are issued again: those named in `steps`, and those operators request.

A request is served at most once, across restarts too: the replacement group names the dropped one
in `replaces`, so the topic `prompts` itself records which requests were served.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from rlstreams.schemas.events import ReplacementRequested
from rlstreams.streams.log.bus import Bus
from rlstreams.streams.log.topics import DEAD_LETTERS, PROMPTS
from rlstreams.workers.loop.foreign import ForeignRecords
from rlstreams.workers.prompts.issue import PlannedGroup
from rlstreams.workers.prompts.issued import find_prompt
from rlstreams.workers.prompts.pacing import DroppedGroups

MAX_POLL = 100


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
