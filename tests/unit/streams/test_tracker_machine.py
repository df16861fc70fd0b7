"""A partition's tracker under any order of deliveries, commits, notes, deaths and clean ends."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rlstreams.streams.log.done_set import MAX_CHARACTERS, covered, note_of
from rlstreams.streams.log.probing import Probing
from rlstreams.streams.log.record import Committed, Position, RawRecord
from rlstreams.streams.log.tracker import PartitionTracker


class TrackerMachine(RuleBasedStateMachine):
    """The model: which offsets are records, which of them have an output, what note is due."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[bool] = []  # by offset: a record, or a marker
        self.outputs: list[int] = []
        self.committed = Committed(offset=0)
        self.tries: dict[int, int] = {}  # by record, as noted last while it was unfinished
        self.start()

    def start(self) -> None:
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

    @precondition(lambda self: self.work)
    @rule(data=st.data(), on_probation=st.booleans())
    def finish(self, data: st.DataObject, on_probation: bool) -> None:
        offsets = data.draw(st.sets(st.sampled_from(sorted(self.work)), min_size=1))
        finished = [self.work.pop(offset) for offset in sorted(offsets)]
        self.committed = self.tracker.after(finished, on_probation=on_probation)
        self.tracker.commit(finished, on_probation=on_probation)
        self.outputs += sorted(offsets)
        for offset in offsets:
            self.tries.pop(offset, None)

    @precondition(lambda self: self.work)
    @rule()
    def try_the_first(self) -> None:
        """What a probing worker does before it begins its first record."""
        first = min(self.work)
        note = Probing(first, self.tries.get(first, 0) + 1)
        self.committed = self.tracker.after((), note)
        self.tracker.note(note)
        self.tries = {first: note.tries}

    @rule()
    def die(self) -> None:
        self.start()

    @invariant()
    def each_record_is_done_once(self) -> None:
        assert len(self.outputs) == len(set(self.outputs))
        for offset, is_record in enumerate(self.log):
            if is_record:
                assert (offset in self.outputs) == covered(self.committed, offset)

    @invariant()
    def the_note_stays_with_its_record(self) -> None:
        found = Probing.parse(note_of(self.committed.metadata))
        for offset, tries in self.tries.items():
            assert Probing(offset, tries) == found

    @invariant()
    def metadata_is_short(self) -> None:
        assert len(self.committed.metadata) <= MAX_CHARACTERS

    @invariant()
    def bytes_are_those_of_open_records(self) -> None:
        assert len(self.work) == self.tracker.num_bytes


TrackerMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestTracker = TrackerMachine.TestCase
