"""Issued groups and evaluations: a fold of the topic `prompts`, and the reader that feeds it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from rlstreams.schemas import SchemaTexts
from rlstreams.schemas.events import EVALUATE, NO_VERSION, TRAIN, Prompt, RunBranched
from rlstreams.schemas.projection import Projection
from rlstreams.streams.log.bus import Bus
from rlstreams.streams.log.codec import decoded
from rlstreams.streams.log.group_ids import evaluation_id, issue_number
from rlstreams.streams.log.read_to import read_to
from rlstreams.streams.log.record import Position, RawRecord
from rlstreams.streams.log.topics import PROMPTS
from rlstreams.workers.dataset.order import Order
from rlstreams.workers.prompts.issue import PlannedGroup

MAX_POLL = 1000
_IDENTITY = Projection(Prompt, "group_id", "sample", "purpose")


@dataclass(slots=True)
class _Group:
    prompt: Prompt  # any sample of it
    samples: set[int]

    def add(self, sample: int) -> bool:
        """Whether all samples are there, now that this one is."""
        if sample < self.prompt.group_size:
            self.samples.add(sample)
        return len(self.samples) == self.prompt.group_size

    def missing(self) -> Iterator[Prompt]:
        for sample in range(self.prompt.group_size):
            if sample not in self.samples:
                yield dataclasses.replace(self.prompt, sample=sample)


class Issued:
    """The groups and evaluations that the topic holds. Fold all of its records, then `settle`.

    Records are decoded once per group or held-out row; of the rest, three fields. A record that no
    `prompts` worker of this run can have written changes nothing here; a rollout worker sets it
    aside if it is no prompt at all.

    Args:
        seed: of the run; every prompt carries it.
        num_partitions: of the topic: a group's number modulo it is the group's partition.
        schemas: of the bus that the records come from.
    """

    def __init__(self, seed: int, num_partitions: int, schemas: SchemaTexts) -> None:
        self._seed = seed
        self._schemas = schemas
        self._num_partitions = num_partitions
        self._groups: dict[int, _Group] = {}  # torn so far
        # Epoch and row of every group; None: it replaces another, and is no part of the order.
        self._places: dict[int, tuple[int, int] | None] = {}
        self._next_number = 0
        self._free: list[int] = []
        self._first_own = 0  # of a branch: the number that its parent had not reached
        self._owed: dict[int, PlannedGroup] = {}  # of a branch: numbers that its parent left open
        self.replaced: set[str] = set()  # groups that have a replacement
        self.position = 0  # in the training order: of the next new group
        self.evaluated_version = NO_VERSION
        self.evaluated_rows: set[int] = set()  # of that version, with all of their samples
        self._torn_rows: dict[int, _Group] = {}  # of that version too

    def apply(self, raw: RawRecord) -> None:
        """Fold one record.

        Raises:
            ValueError: none of this run's prompts, and nothing changed; names what is wrong.
        """
        group_id, sample, purpose = _IDENTITY.read(raw.value, self._schemas)
        if sample < 0:
            raise ValueError(f"sample must be 0 or above, got {sample}")
        if purpose == EVALUATE and (place := evaluation_id(group_id)) is not None:
            self._evaluation(*place, sample, raw)
        elif purpose == TRAIN and (number := issue_number(group_id)) is not None:
            self._training(number, sample, raw)
        else:
            raise ValueError(f"{group_id!r}, to {purpose}, names no group of a run")

    def settle(self, order: Order) -> Sequence[Prompt]:
        """End the fold; return samples that a torn transaction left out, to be written again.

        A group of which nothing is left gives its number to the next new one; its row comes again
        in the next epoch.
        """
        self._next_number = max(self._places, default=-1) + 1
        self._free = sorted(set(range(self._next_number)) - self._places.keys(), reverse=True)
        places = [place for place in self._places.values() if place]
        newest = max((epoch for epoch, _ in places), default=0)
        self.position = order.after(newest, [row for epoch, row in places if epoch == newest])
        torn = [p for _, group in sorted(self._groups.items()) for p in group.missing()]
        self._groups.clear()
        return torn

    def branched(self, event: RunBranched, _: Position | None = None) -> None:
        """Go on where the parent was: the ledger's `on_branch`, after `settle`.

        Its closed groups count as issued; its open ones are issued here, under the same numbers.
        """
        self._first_own = event.next_group
        self._next_number = max(self._next_number, event.next_group)
        self._free = sorted(set(range(self._next_number)) - self._places.keys(), reverse=True)
        self.position = max(self.position, event.next_position)
        for group in event.open:
            self._owed[int(group.group_id)] = PlannedGroup(
                number=int(group.group_id),
                row=group.row,
                dataset_epoch=group.dataset_epoch,
                replaces=group.replaces,
                replacement=group.replacement,
            )

    def owed(self, numbers: Sequence[int]) -> list[PlannedGroup]:
        """Groups of the parent that have one of `numbers`: they are issued first."""
        return [self._owed[number] for number in numbers if number in self._owed]

    def forget(self, is_closed: Callable[[int], bool]) -> None:
        """A missing group that is closed was not torn but removed by retention: keep its number."""
        self._free = [number for number in self._free if not is_closed(number)]
        self._places.clear()

    @property
    def num_groups(self) -> int:
        """Training groups issued."""
        return self._next_number - len(self._free)

    @property
    def highest(self) -> int:
        """The highest group number issued; -1 if none was."""
        return self._next_number - 1

    def numbers(self, count: int) -> list[int]:
        """Numbers for the next `count` groups; nothing is taken yet."""
        reused = self._free[::-1][:count]
        fresh = range(self._next_number, self._next_number + count - len(reused))
        return [*reused, *fresh]

    def take(self, groups: Sequence[PlannedGroup]) -> None:
        """Note that these groups are committed."""
        for group in groups:
            if self._free and self._free[-1] == group.number:
                self._free.pop()
            else:
                self._next_number = group.number + 1
            if group.replaces is not None:
                self.replaced.add(group.replaces)
            elif group.number >= self._first_own:
                self.position += 1

    def evaluate(self, version: int, rows: Sequence[int]) -> None:
        """Note that the evaluation of `version` on `rows` is committed."""
        if version != self.evaluated_version:
            self.evaluated_version, self.evaluated_rows = version, set()
            self._torn_rows.clear()
        self.evaluated_rows.update(rows)
        for row in rows:
            self._torn_rows.pop(row, None)

    def torn_evaluation(self, version: int, row: int) -> Sequence[Prompt]:
        """Samples that a torn transaction left out, if others of that row are there."""
        group = self._torn_rows.get(row) if version == self.evaluated_version else None
        return [*group.missing()] if group else []

    def _training(self, number: int, sample: int, raw: RawRecord) -> None:
        group = self._groups.get(number)
        if group is None:
            if number in self._places:
                return  # whole
            prompt = self._prompt(raw, number)
            group = self._groups[number] = _Group(prompt, set())
            self._note(number, prompt)
        if group.add(sample):
            del self._groups[number]

    def _evaluation(self, version: int, row: int, sample: int, raw: RawRecord) -> None:
        is_same = version == self.evaluated_version
        if version < self.evaluated_version or (is_same and row in self.evaluated_rows):
            return
        group = self._torn_rows.get(row) if is_same else None
        if group is None:
            group = _Group(self._prompt(raw, row), set())
            self.evaluate(version, ())
            self._torn_rows[row] = group
        if group.add(sample):
            self.evaluate(version, [row])

    def _prompt(self, raw: RawRecord, place: int) -> Prompt:
        """Decode a prompt of this run, in the partition of its number or row, `place`."""
        prompt = decoded(raw, self._schemas).event
        assert isinstance(prompt, Prompt)  # its identity was read
        expected: list[tuple[str, object, object]] = [
            ("seed", self._seed, prompt.seed),
            ("partition", place % self._num_partitions, raw.position.partition),
        ]
        for name, wanted, found in expected:
            if wanted != found:
                raise ValueError(f"no prompt of this run: {name} must be {wanted}, got {found}")
        return prompt

    def _note(self, number: int, prompt: Prompt) -> None:
        if prompt.replaces is None:
            self._places[number] = (prompt.dataset_epoch, prompt.row)
        else:
            self._places[number] = None
            self.replaced.add(prompt.replaces)


def read_issued(
    bus: Bus, issued: Issued, deadline_s: float, pass_by: Callable[[RawRecord, str], None]
) -> None:
    """Fold the whole topic `prompts` up to its last stable offset.

    Args:
        pass_by: called with each record that is no prompt of this run, and why.

    Raises:
        DeadlineError: nothing came for `deadline_s`.
    """
    with bus.reader(bus.beginnings(PROMPTS.name)) as reader:
        for records in read_to(reader, bus.ends(PROMPTS.name), deadline_s, batch=MAX_POLL):
            for raw in records:
                try:
                    issued.apply(raw)
                except ValueError as err:
                    pass_by(raw, str(err))
