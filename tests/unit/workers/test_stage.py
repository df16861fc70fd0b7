"""The loop that turns records of one topic into another, on the in-memory bus."""

from __future__ import annotations

from collections.abc import Sequence, Set

import pytest

from rlstreams.schemas.events import DeadLetter, Event, Prompt, Trajectory
from rlstreams.streams.log.bus import Bus
from rlstreams.streams.log.codec import decoded, outgoing
from rlstreams.streams.log.done_set import covered
from rlstreams.streams.log.errors import OutcomeUnknownError
from rlstreams.streams.log.record import Outgoing, Partition, Record
from rlstreams.streams.log.topics import DEAD_LETTERS, PROMPTS, TRAJECTORIES
from rlstreams.workers.config.run import RunConfig
from rlstreams.workers.loop import stage as stage_module
from rlstreams.workers.loop.context import Context
from rlstreams.workers.loop.reporter import Reporter
from rlstreams.workers.loop.stage import Finished, StageLoop
from tests import factories
from tests.logs import made_log
from tests.memory.bus import MemoryBus
from tests.memory.consumer import MemoryGroupConsumer
from tests.memory.log import Fault, MemoryLog
from tests.unit.roles.stand import tick_until

P0 = Partition(PROMPTS.name, 0)


class HeldStage:
    """Finishes what a test releases; a prompt becomes a trajectory of the same sample."""

    def __init__(self) -> None:
        self.begun: dict[str, Record[Event]] = {}
        self.released: list[str] = []
        self.may_join = True
        self.is_out = False

    def room(self) -> int:
        return self.most

    most = 100

    def begin(self, record: Record[Event]) -> None:
        if not isinstance(record.event, Prompt):
            raise ValueError("not a prompt")  # noqa: TRY004
        self.begun[name_of(record.event)] = record

    def finished(self) -> Sequence[Finished]:
        released = [self.begun.pop(name) for name in self.released if name in self.begun]
        self.released = []
        return [Finished(raw=record.raw, outputs=(output_of(record),)) for record in released]

    def give_up(self, partitions: Set[Partition]) -> None:
        """A test releases what it likes; what went is dropped behind the stage."""

    def announcements(self) -> Sequence[Outgoing]:
        return []

    @property
    def num_open(self) -> int:
        return len(self.begun)

    def close(self) -> None:
        self.begun.clear()


def name_of(event: Prompt | Trajectory) -> str:
    return f"{event.group_id}/{event.sample}"


def output_of(record: Record[Event]) -> Outgoing:
    assert isinstance(record.event, Prompt)
    event = factories.trajectory(group_id=record.event.group_id, sample=record.event.sample)
    return outgoing(TRAJECTORIES, event)


def make_log() -> MemoryLog:
    return made_log(partitions=2)


def make_loop(log: MemoryLog, stage: HeldStage, ordinal: int = 0) -> StageLoop:
    bus = MemoryBus(log, "run")
    context = Context(
        config=RunConfig(), bus=bus, role="rollout", ordinal=ordinal, instance=f"i{id(stage)}"
    )
    return StageLoop(context, bus, stage, PROMPTS.name, reporter=Reporter(context), interval_s=0.0)


def issue(log: MemoryLog, *names: str, partition: int = 0) -> None:
    records = []
    for name in names:
        group_id, sample = name.split("/")
        event = factories.prompt(group_id=group_id, sample=int(sample))
        records.append(outgoing(PROMPTS, event, partition=partition))
    MemoryBus(log, "run").producer("prompts.0").commit(records)


def read(bus: Bus, topic: str) -> list[Event]:
    reader = bus.reader(bus.beginnings(topic))
    return [decoded(raw).event for raw in reader.poll(1000, 0.0)]


def outputs(log: MemoryLog) -> list[str]:
    events = read(MemoryBus(log, "run"), TRAJECTORIES.name)
    return sorted(name_of(event) for event in events if isinstance(event, Trajectory))


def ticks(loop: StageLoop, num: int = 3) -> None:
    for _ in range(num):
        loop._next_commit = 0.0
        loop.tick()


def test_an_unknown_outcome_ends_the_process_and_the_successor_settles_it() -> None:
    """The commit had happened: the successor finds the records done."""
    log, stage = make_log(), HeldStage()
    issue(log, "0/0", "0/1")
    loop = make_loop(log, stage)
    ticks(loop)
    log.fail_next_commit("run.rollout.0", Fault.AFTER)
    stage.released = ["0/0", "0/1"]
    with pytest.raises(OutcomeUnknownError):
        ticks(loop)
    loop.close()
    again = HeldStage()
    ticks(make_loop(log, again))
    assert again.begun == {}
    assert outputs(log) == ["0/0", "0/1"]


def test_a_member_that_cannot_work_yet_is_given_nothing() -> None:
    """Its server starts for a minute: what lies in all partitions is another's meanwhile."""
    log, stage, other = make_log(), HeldStage(), HeldStage()
    stage.may_join = False
    loop, others = make_loop(log, stage), make_loop(log, other, ordinal=1)
    ticks(loop)
    ticks(others)
    issue(log, "0/0", partition=0)
    issue(log, "1/0", partition=1)
    ticks(loop)
    ticks(others)
    assert ({"0/0", "1/0"}, set()) == (other.begun.keys(), stage.begun.keys())
    other.released = ["0/0", "1/0"]
    ticks(others)
    stage.may_join = True
    for _ in range(3):
        ticks(loop)
        ticks(others)
    issue(log, "2/0", partition=0)
    issue(log, "3/0", partition=1)
    ticks(loop)
    ticks(others)
    assert {"2/0", "3/0"} == other.begun.keys() | stage.begun.keys()
    assert other.begun
    assert stage.begun


def test_a_member_that_can_no_longer_work_hands_its_records_over_and_comes_back() -> None:
    """Its server died and starts for a minute; the trainer waits for no group of its partitions."""
    log, stage, other = make_log(), HeldStage(), HeldStage()
    loop, others = make_loop(log, stage), make_loop(log, other, ordinal=1)

    def both() -> None:
        for _ in range(3):
            ticks(loop, 1)
            ticks(others, 1)

    both()
    issue(log, "0/0", partition=0)
    issue(log, "1/0", partition=1)
    both()
    (mine,) = stage.begun
    stage.may_join, stage.is_out = False, True
    both()
    assert {"0/0", "1/0"} == other.begun.keys()
    stage.released, other.released = [mine], ["0/0", "1/0"]  # what it finds after all is dropped
    both()
    assert ["0/0", "1/0"] == outputs(log)
    stage.may_join, stage.is_out = True, False
    both()
    issue(log, "2/0", partition=0)
    issue(log, "3/0", partition=1)
    both()
    assert (1, 1) == (len(stage.begun), len(other.begun))


def test_a_member_without_peers_keeps_its_records() -> None:
    """Nobody could do them meanwhile, and an agent under way need not begin again."""
    log, stage = make_log(), HeldStage()
    loop = make_loop(log, stage)
    ticks(loop)
    issue(log, "0/0", "0/1")
    ticks(loop)
    stage.is_out = True
    ticks(loop)
    stage.released = ["0/0", "0/1"]
    ticks(loop)
    assert ["0/0", "0/1"] == outputs(log)


def _bytes_of(record: Outgoing) -> bytes:
    return b"".join(bytes(piece) for piece in record.value)


GOOD = _bytes_of(outgoing(PROMPTS, factories.prompt(group_id="0", sample=3)))
POISON = {
    "foreign": (b"not avro", "single-object"),
    "empty": (b"", "0 bytes"),
    "truncated, or a part missing": (GOOD[:-3], "damaged, or cut short"),
    "an unknown schema": (GOOD[:2] + b"12345678" + GOOD[10:], "3132333435363738"),
    "another event": (
        _bytes_of(outgoing(TRAJECTORIES, factories.trajectory(group_id="0", sample=3))),
        "not a prompt",
    ),
}


@pytest.mark.parametrize("kind", POISON)
def test_poison_goes_to_the_dead_letters_and_stops_nobody(kind: str) -> None:
    """Bytes that are no prompt are set aside with their place; the next record is handled."""
    log, stage = make_log(), HeldStage()
    value, told = POISON[kind]
    poison = Outgoing(
        topic=PROMPTS.name,
        key=b"0",
        value=[value],
        headers={"rlstreams-id": b"0/3/0"},
        partition=0,
    )
    MemoryBus(log, "run").producer("foreign").commit([poison])
    issue(log, "0/0")
    loop = make_loop(log, stage)
    ticks(loop)
    bus = MemoryBus(log, "run")
    (letter,) = read(bus, DEAD_LETTERS.name)
    assert isinstance(letter, DeadLetter)
    assert kind == "another event" or not letter.group_id  # the header names nobody
    reason = "validation" if kind == "another event" else "decode"
    assert letter.reason == reason
    assert told in letter.detail
    assert (letter.origin_topic, letter.origin_offset) == (PROMPTS.name, 0)
    assert letter.value == value
    assert sorted(stage.begun) == ["0/0"]
    assert covered(bus.committed("rollout", PROMPTS.name)[P0], 0)


def test_a_drained_loop_finishes_what_it_began() -> None:
    """After drain nothing new is taken, and done comes once all is committed."""
    log, stage = make_log(), HeldStage()
    issue(log, "0/0")
    loop = make_loop(log, stage)
    ticks(loop)
    loop.drain()
    issue(log, "1/0")
    ticks(loop)
    assert (sorted(stage.begun), loop.done) == (["0/0"], False)
    stage.released = ["0/0"]
    ticks(loop)
    assert (outputs(log), loop.done) == (["0/0"], True)


def test_after_two_deaths_records_are_begun_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next one when the one before is committed, or has taken long; other partitions wait."""
    log = make_log()
    issue(log, "0/0", "0/1", "0/2", "0/3")
    for _ in range(2):
        loop = make_loop(log, HeldStage())
        ticks(loop)
        assert isinstance(loop._consumer, MemoryGroupConsumer)
        loop._consumer.expel()
    issue(log, "1/0", partition=1)
    held = HeldStage()
    loop = make_loop(log, held)
    ticks(loop)
    assert list(held.begun) == ["0/0"]
    held.released = ["0/0"]
    tick_until(loop, lambda: list(held.begun) == ["0/1"])
    ticks(loop)
    assert list(held.begun) == ["0/1"]
    monkeypatch.setattr(stage_module, "PATIENCE_S", 0.0)
    tick_until(loop, lambda: list(held.begun) == ["0/1", "0/2", "0/3", "1/0"])


def test_nothing_is_polled_beyond_the_bytes_in_hand(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The next record comes once what is in work is committed."""
    monkeypatch.setattr(stage_module, "IN_HAND_BYTES", 1)
    log, held = make_log(), HeldStage()
    issue(log, "0/0", "0/1")
    loop = make_loop(log, held)
    ticks(loop, 5)
    assert list(held.begun) == ["0/0"]
    held.released = ["0/0"]
    tick_until(loop, lambda: list(held.begun) == ["0/1"])
