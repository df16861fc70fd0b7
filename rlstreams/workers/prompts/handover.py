"""The groups that a run's `prompts` would have issued next after a step, for a branch of the run.

The closed groups decide how far the run was at a step, never a clock: every number up to the
highest closed one was issued, and those among them that are not closed were open.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from rlstreams.schemas import SchemaTexts
from rlstreams.schemas.events import DroppedGroup, OpenGroup, Prompt
from rlstreams.streams.ledger import Ledger
from rlstreams.streams.log.bus import Bus
from rlstreams.streams.log.errors import ConfigError
from rlstreams.streams.log.group_ids import issue_number
from rlstreams.streams.log.record import RawRecord
from rlstreams.streams.log.topics import PROMPTS
from rlstreams.workers.config.run import RunConfig
from rlstreams.workers.dataset.order import Order
from rlstreams.workers.prompts.issued import Issued, read_issued


@dataclass(frozen=True, slots=True, kw_only=True)
class Handover:
    """Work that a branch takes over, in the fields of `RunBranched`."""

    next_group: int
    next_position: int
    open: tuple[OpenGroup, ...]
    dropped: tuple[DroppedGroup, ...]


class _Reached(Issued):
    """The groups that a run had issued up to a step, with row and epoch of the open ones."""

    def __init__(self, seed: int, num_partitions: int, schemas: SchemaTexts, at: Ledger) -> None:
        super().__init__(seed, num_partitions, schemas)
        self._at = at
        self.next_group = at.highest_closed + 1
        self.open: dict[int, OpenGroup] = {}

    def _training(self, number: int, sample: int, raw: RawRecord) -> None:
        if number < self.next_group:
            super()._training(number, sample, raw)

    def _note(self, number: int, prompt: Prompt) -> None:
        super()._note(number, prompt)
        if not self._at.is_closed(number):
            self.open[number] = OpenGroup(
                group_id=prompt.group_id,
                row=prompt.row,
                dataset_epoch=prompt.dataset_epoch,
                replaces=prompt.replaces,
                replacement=prompt.replacement,
            )


def handover(
    bus: Bus, at: Ledger, dropped: Iterable[DroppedGroup], config: RunConfig, num_rows: int
) -> Handover:
    """Return the work that the run of `bus` would have gone on with.

    Args:
        at: its ledger, up to the step and no further.
        dropped: groups that it had dropped by then.
        num_rows: of the training data.

    Raises:
        ConfigError: the log no longer has, or a recording never had, the prompts of an open group.
        DeadlineError: `prompts` could not be read.
    """
    reached = _Reached(config.run.seed, bus.partitions(PROMPTS.name), bus.schemas(), at)
    read_issued(bus, reached, config.deadlines.commit_s, lambda _raw, _why: None)
    reached.settle(Order(config.run.seed, num_rows))
    position, owed = reached.position, reached.open
    if (branch := at.branch) is not None:
        position = max(position, branch.next_position)
        left = {int(group.group_id): group for group in branch.open}
        owed = {n: group for n, group in left.items() if not at.is_closed(n)} | owed
        dropped = (*branch.dropped, *dropped)
    numbers = range(at.closed.watermark, reached.next_group)
    if gone := [number for number in numbers if not at.is_closed(number) and number not in owed]:
        raise ConfigError(
            f"group {gone[0]} was open at step {at.last_step}, and {PROMPTS.name} does not hold "
            "its prompts any more, or a recording does not hold the topic: nobody knows its row. "
            "Branch at another step, or from a recording of the whole run"
        )
    most = config.prompts.max_replacements
    return Handover(
        next_group=reached.next_group,
        next_position=position,
        open=tuple(group for _, group in sorted(owed.items())),
        dropped=tuple(
            group
            for group in dropped
            if not group.permanent
            and group.replacement < most
            and group.group_id not in reached.replaced
            and (number := issue_number(group.group_id)) is not None
            and at.is_closed(number)
        ),
    )
