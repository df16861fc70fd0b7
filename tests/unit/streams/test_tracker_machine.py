"""A partition's tracker under any order of deliveries, commits, tries, deaths and clean ends."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rlstreams.streams.log.done_set import MAX_CHARACTERS, covered, tries_of
from rlstreams.streams.log.record import Committed, Position, RawRecord
from rlstreams.streams.log.tracker import ISOLATING_TRIES, PartitionTracker


class TrackerMachine(RuleBasedStateMachine):
    """The model: which offsets are records, which have an output, how many tries are due."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[bool] = []  # by offset: a record, or a marker
        self.outputs: list[int] = []
        self.committed = Committed(offset=0)
        self.tries = 0  # of the oldest unfinished record
        self.start()

    def start(self) -> None:
        self.inherited = self.tries
        self.tracker = PartitionTracker(self.committed)
        self.work: dict[int, RawRecord] = {}
        self.next = self.committed.offset

    @rule(kinds=st.lists(st.booleans(), min_size=1, max_size=6))
    def write(self, kinds: list[bool]) -> None:
        self.log += kinds

    @rule(num=st.integers(1, 8))
    def deliver(self, num: int) -> None:
        end = min(len(self.log), self.next + num)
        for offset in range(self.next, end):
            raw = RawRecord(
                position=Position("t", 0, offset), offsets=(offset,), key=b"", value=b"v"
            )
            if self.log[offset] and self.tracker.deliver(raw):
                self.work[offset] = raw
        self.next = end
        self.tracker.advance(end)

    @precondition(lambda self: self.work and not self.tracker.is_noted)
    @rule()
    def note(self) -> None:
        """What a worker commits before it begins its first record."""
        self.committed = self.tracker.after((), self.tracker.inherited + 1)
        self.tracker.note()
        self.tries += 1

    @precondition(lambda self: self.work and self.tracker.is_noted)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        offsets = data.draw(st.sets(st.sampled_from(sorted(self.work)), min_size=1))
        if min(self.work) in offsets:
            is_isolated, is_next = self.tracker.is_isolated, len(offsets) < len(self.work)
            self.inherited = ISOLATING_TRIES - 1 if is_isolated else 0
            self.tries = self.inherited + (is_isolated and is_next)
        finished = [self.work.pop(offset) for offset in sorted(offsets)]
        self.committed = self.tracker.after(finished)
        self.tracker.commit(finished)
        self.outputs += sorted(offsets)

    @rule()
    def end_isolation(self) -> None:
        self.tracker.is_isolated = False

    @rule()
    def die(self) -> None:
        self.start()

    @rule()
    def leave(self) -> None:
        """Alive: with the tries of predecessors alone."""
        self.committed = self.tracker.after((), self.tracker.inherited)
        self.tries = self.inherited
        self.start()

    @invariant()
    def each_record_is_done_once(self) -> None:
        assert len(self.outputs) == len(set(self.outputs))
        for offset, is_record in enumerate(self.log):
            if is_record:
                assert (offset in self.outputs) == covered(self.committed, offset)

    @invariant()
    def the_tries_stay_with_their_record(self) -> None:
        assert tries_of(self.committed.metadata) == self.tries

    @invariant()
    def metadata_is_short(self) -> None:
        assert len(self.committed.metadata) <= MAX_CHARACTERS

    @invariant()
    def bytes_are_those_of_open_records(self) -> None:
        assert len(self.work) == self.tracker.num_bytes


TrackerMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestTracker = TrackerMachine.TestCase
