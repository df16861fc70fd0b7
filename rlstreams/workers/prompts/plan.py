"""The next prompts to issue: groups that were torn, dropped or are new, and evaluations.

Open groups are those issued minus those closed. Group numbers are dense, so the closed set is a
watermark and a few numbers, and every event of `steps` that closes groups carries all of it.
"""

from __future__ import annotations

from collections.abc import Sequence

from rlstreams.schemas.events import NO_VERSION, Prompt
from rlstreams.streams.ledger import Ledger
from rlstreams.workers.config.run import RunConfig
from rlstreams.workers.dataset.order import Order
from rlstreams.workers.prompts.issue import PlannedGroup
from rlstreams.workers.prompts.issued import Issued
from rlstreams.workers.prompts.replacing import Replacements

GROUPS_PER_COMMIT = 64


class IssuePlan:
    """Reads the folds of `steps`, `prompts` and `dead-letters`; the worker commits its prompts.

    Args:
        issued: all of the topic as this process found it.
        num_rows: of the training data.
        num_held_out: rows to evaluate on; 0: none.
    """

    def __init__(
        self,
        config: RunConfig,
        ledger: Ledger,
        issued: Issued,
        replacements: Replacements,
        *,
        num_rows: int,
        num_held_out: int,
    ) -> None:
        self._config = config
        self._ledger = ledger
        self._issued = issued
        self._replacements = replacements
        self._order = Order(config.run.seed, num_rows)
        self._torn = issued.settle(self._order)
        limit = config.prompts.evaluate_rows or num_held_out
        self._held_out_rows = range(min(limit, num_held_out))

    def torn(self) -> Sequence[Prompt]:
        """Samples of open groups that a torn transaction left out; issued first, and once."""
        self._issued.forget(self._ledger.is_closed)
        return [p for p in self._torn if not self._ledger.is_closed(int(p.group_id))]

    def groups(self) -> Sequence[PlannedGroup]:
        """The groups to issue now: a branch's parent's, replacements, then the training order."""
        num = room(
            self._ledger,
            self._issued.num_groups,
            self._config.max_open_groups,
            self._config.trainer.groups_per_step,
        )
        numbers = self._issued.numbers(min(num, GROUPS_PER_COMMIT))
        owed = self._issued.owed(numbers)
        numbers = numbers[len(owed) :]
        groups = self._replacements.planned(numbers, self._issued.replaced)
        return [*owed, *groups, *self._in_order(numbers[len(groups) :])]

    def evaluation(self) -> tuple[int, Sequence[int]]:
        """The version to evaluate now, and the held-out rows that are still to be issued for it."""
        last, done = self._issued.evaluated_version, self._issued.evaluated_rows
        whole = done.issuperset(self._held_out_rows)
        every = self._config.prompts.evaluate_every
        version = evaluation_due(self._ledger, every, last if whole else last - 1)
        if version is None:
            return NO_VERSION, ()
        issued = done if version == last else frozenset[int]()
        return version, [row for row in self._held_out_rows if row not in issued]

    def _in_order(self, numbers: Sequence[int]) -> list[PlannedGroup]:
        """Groups of the next rows of the training order, under these numbers."""
        groups = []
        for position, number in enumerate(numbers, self._issued.position):
            epoch, row = self._order.at(position)
            groups.append(PlannedGroup(number=number, row=row, dataset_epoch=epoch))
        return groups


def room(ledger: Ledger, num_issued: int, max_open: int, groups_per_step: int) -> int:
    """Number of groups that may be issued now; 0 before the first claim.

    Open groups stay at or below `max_open`, and below what the steps that are left can use.
    """
    usable = (ledger.step_target - ledger.last_step) * groups_per_step
    return max(0, min(max_open, usable) - (num_issued - ledger.num_closed))


def evaluation_due(ledger: Ledger, every: int, last: int) -> int | None:
    """The version to evaluate now, if one is due.

    Due are the version that the run began with (0, or a branch's base), then every `every` versions
    (0: none), and the last one of the run. A version that passed while nothing was issued is left
    out: samples now come from newer weights.

    Args:
        last: the newest version whose evaluation was issued, or NO_VERSION.
    """
    if ledger.claim is None:
        return None
    due = ledger.policy_version
    if not ledger.at_target:
        begin = ledger.branch.policy_version if ledger.branch else 0
        due = max(begin, due - due % every if every else begin)
    return due if due > last else None
