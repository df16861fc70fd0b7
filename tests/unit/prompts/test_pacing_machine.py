"""The pacing fold against a plain model of sets, whatever happens in whatever order."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rlstreams.schemas.events import ClosedGroups, Event
from rlstreams.streams.ledger import Ledger
from rlstreams.workers.prompts.plan import room
from rlstreams.workers.prompts.replacing import DroppedGroups
from tests.factories import dropped_group, groups_dropped, step_completed, trainer_started

MAX_OPEN = 6
GROUPS_PER_STEP = 2
MAX_REPLACEMENTS = 2
STEP_TARGET = 30


def closed_of(numbers: set[int]) -> ClosedGroups:
    watermark = 0
    while watermark in numbers:
        watermark += 1
    return ClosedGroups(
        watermark=watermark, above=tuple(sorted(n for n in numbers if n > watermark))
    )


class Pacing(RuleBasedStateMachine):
    """A trainer that claims, steps and drops, fenced rivals, and an issuer that fills up."""

    def __init__(self) -> None:
        super().__init__()
        self.dropped = DroppedGroups(MAX_REPLACEMENTS, 10**6, pytest.fail)
        self.ledger = Ledger()
        self.ledger.listen(on_drop=self.dropped.add)
        self.log: list[Event] = []
        self.epoch = self.step = self.version = self.num_issued = 0
        self.closed: set[int] = set()
        self.replaced: list[str] = []  # in the order in which they were dropped

    def say(self, event: Event) -> None:
        self.log.append(event)
        self.ledger.apply(event)

    @property
    def open(self) -> list[int]:
        return [number for number in range(self.num_issued) if number not in self.closed]

    @precondition(lambda self: self.epoch < 3)
    @rule()
    def claim(self) -> None:
        self.epoch += 1
        self.say(trainer_started(epoch=self.epoch, step_target=STEP_TARGET, policy_version=0))

    @rule()
    def issue(self) -> None:
        self.num_issued += room(self.ledger, self.num_issued, MAX_OPEN, GROUPS_PER_STEP)

    @precondition(lambda self: self.epoch and len(self.open) >= GROUPS_PER_STEP)
    @rule(data=st.data())
    def train(self, data: st.DataObject) -> None:
        """Any complete groups: samples finish in any order."""
        chosen = data.draw(st.permutations(self.open))[:GROUPS_PER_STEP]
        self.closed |= set(chosen)
        self.step += 1
        self.version += 1
        event = step_completed(
            self.step, epoch=self.epoch, policy_version=self.version, closed=closed_of(self.closed)
        )
        self.say(event)

    @precondition(lambda self: self.epoch and self.open)
    @rule(data=st.data(), permanent=st.booleans(), replacement=st.integers(0, MAX_REPLACEMENTS))
    def drop(self, data: st.DataObject, permanent: bool, replacement: int) -> None:
        chosen = data.draw(st.sets(st.sampled_from(self.open), min_size=1))
        self.closed |= chosen
        groups = tuple(
            dropped_group(str(n), permanent=permanent, replacement=replacement)
            for n in sorted(chosen)
        )
        self.say(groups_dropped(epoch=self.epoch, groups=groups, closed=closed_of(self.closed)))
        if not permanent and replacement < MAX_REPLACEMENTS:
            self.replaced += [group.group_id for group in groups]

    @precondition(lambda self: self.epoch > 1)
    @rule(ahead=st.integers(1, 9))
    def zombie(self, ahead: int) -> None:
        """A fenced trainer says that it trained or dropped far more than there is."""
        far = ClosedGroups(watermark=self.num_issued + ahead)
        epoch = self.epoch - 1
        self.say(step_completed(self.step + 1, epoch=epoch, policy_version=99, closed=far))
        self.say(groups_dropped(epoch=epoch, groups=(dropped_group("0"),), closed=far))

    @precondition(lambda self: self.log)
    @rule(data=st.data())
    def again(self, data: st.DataObject) -> None:
        """An event of the present owner lies in the log twice."""
        mine = [event for event in self.log if getattr(event, "epoch", 0) == self.epoch]
        self.say(data.draw(st.sampled_from(mine)))

    @invariant()
    def is_the_model(self) -> None:
        for ledger, dropped in ((self.ledger, self.dropped), self.refolded()):
            assert len(self.closed) == ledger.num_closed
            assert [n in self.closed for n in range(self.num_issued)] == [
                ledger.is_closed(n) for n in range(self.num_issued)
            ]
            assert (self.step, max(self.closed, default=-1)) == (
                ledger.last_step, ledger.highest_closed
            )  # fmt: skip
            if self.epoch:
                assert self.version == ledger.policy_version
            assert self.replaced == [due.replaces for due in dropped.to_replace]

    @invariant()
    def is_bounded(self) -> None:
        assert len(self.open) <= MAX_OPEN
        num = room(self.ledger, self.num_issued, MAX_OPEN, GROUPS_PER_STEP)
        full = min(MAX_OPEN, (STEP_TARGET - self.step) * GROUPS_PER_STEP) if self.epoch else 0
        assert max(0, full - len(self.open)) == num

    def refolded(self) -> tuple[Ledger, DroppedGroups]:
        """What a restarted issuer finds."""
        dropped = DroppedGroups(MAX_REPLACEMENTS, 10**6, pytest.fail)
        ledger = Ledger()
        ledger.listen(on_drop=dropped.add)
        for event in self.log:
            ledger.apply(event)
        return ledger, dropped


TestPacing = Pacing.TestCase
TestPacing.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
