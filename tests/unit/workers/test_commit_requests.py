"""Records that another thread waits to see committed, between begin and finish of their input."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from concurrent.futures import CancelledError, Future

import pytest

from rlstreams.schemas.events import CallReplayed, Trajectory
from rlstreams.streams.log.codec import outgoing
from rlstreams.streams.log.errors import BrokerError, OutcomeUnknownError
from rlstreams.streams.log.record import Outgoing, RawRecord
from rlstreams.streams.log.topics import CALLS, DEAD_LETTERS, PROMPTS, TRAJECTORIES
from rlstreams.workers.config.run import RunConfig
from rlstreams.workers.engines.thread import EngineThread
from rlstreams.workers.loop.commit_requests import CommitRequests
from rlstreams.workers.loop.context import Context
from rlstreams.workers.loop.reporter import Reporter
from rlstreams.workers.loop.runtime import IDLE_S
from rlstreams.workers.loop.stage import StageLoop
from tests.call_events import call_replayed
from tests.memory.bus import MemoryBus
from tests.memory.log import Fault, MemoryLog
from tests.unit.roles.stand import DEADLINE_S, tick_until
from tests.unit.workers.test_stage import HeldStage, issue, make_log, outputs, read


class Asking:
    """A loop with one sample begun, and a thread that asks."""

    def __init__(self) -> None:
        self.log, self.stage, self.commits = make_log(), HeldStage(), CommitRequests()
        issue(self.log, "0/0", partition=1)
        self.loop = make_loop(self.log, self.stage, self.commits)
        tick_until(self.loop, lambda: bool(self.stage.begun))
        self.thread = EngineThread()

    @property
    def raw(self) -> RawRecord:
        return self.stage.begun["0/0"].raw

    def ask(self, number: int, *, ready: list[bool] | None = None) -> Future[None]:
        """Have a record committed; not made before `ready` has something in it."""
        made = lambda: None if ready == [] else [call(number)]  # noqa: E731
        return self.thread.submit(self.commits.committed(self.raw, made))

    def committed(self) -> list[int]:
        found = read(MemoryBus(self.log, "run"), CALLS.name)
        return [one.start for one in found if isinstance(one, CallReplayed)]


@pytest.fixture
def asking():
    made = Asking()
    yield made
    made.thread.close()


def call(number: int) -> Outgoing:
    return outgoing(CALLS, call_replayed(start=number), partition=0)


def make_loop(
    log: MemoryLog, stage: HeldStage, commits: CommitRequests, ordinal: int = 0
) -> StageLoop:
    bus = MemoryBus(log, "run")
    context = Context(
        config=RunConfig(), bus=bus, role="rollout", ordinal=ordinal, instance=f"i{id(stage)}"
    )
    return StageLoop(
        *(context, bus, stage, PROMPTS.name),
        reporter=Reporter(context),
        interval_s=0.0,
        commits=commits,
    )


def test_who_asks_goes_on_once_it_is_committed_and_the_input_stays_open(asking: Asking) -> None:
    answers = [asking.ask(number) for number in range(3)]
    tick_until(asking.loop, lambda: all(answer.done() for answer in answers))
    assert sorted(asking.committed()) == [0, 1, 2]
    assert outputs(asking.log) == []
    asking.stage.released = ["0/0"]
    tick_until(asking.loop, lambda: outputs(asking.log) == ["0/0"])


def test_an_abort_is_sent_again_and_nobody_hears_of_it(asking: Asking) -> None:
    asking.log.fail_next_commit("run.rollout.0", Fault.BEFORE)
    answer = asking.ask(1)
    tick_until(asking.loop, answer.done)
    answer.result()
    assert asking.committed() == [1]


def test_an_unknown_outcome_ends_the_process_and_answers_nobody(asking: Asking) -> None:
    """It had happened: whoever starts again reads it."""
    asking.log.fail_next_commit("run.rollout.0", Fault.AFTER)
    answer = asking.ask(1)
    with pytest.raises(OutcomeUnknownError):
        tick_until(asking.loop, answer.done)
    assert not answer.done()
    assert asking.committed() == [1]


def test_what_cannot_be_made_yet_waits_and_holds_up_nobody(asking: Asking) -> None:
    """A call that names a load which is not announced waits for it; another one does not."""
    ready: list[bool] = []
    late = asking.ask(1, ready=ready)
    soon = asking.ask(2)
    tick_until(asking.loop, soon.done)
    assert not late.done()
    ready.append(True)
    tick_until(asking.loop, late.done)
    assert asking.committed() == [2, 1]


def test_who_gives_up_before_it_is_taken_asks_for_nothing(asking: Asking) -> None:
    answer = asking.ask(1, ready=[])
    tick_until(asking.loop, lambda: bool(asking.commits._kept))
    answer.cancel()
    other = asking.ask(2)
    tick_until(asking.loop, other.done)
    with pytest.raises(CancelledError):
        answer.result()
    asking.loop.tick()
    assert asking.committed() == [2]
    assert asking.commits._kept == []


def test_a_note_comes_before_what_is_asked_for_later(asking: Asking) -> None:
    asking.commits.note(asking.raw, call(7))
    answer = asking.ask(8)
    tick_until(asking.loop, answer.done)
    assert asking.committed() == [7, 8]


def test_a_partition_that_went_away_takes_its_records_with_it(asking: Asking) -> None:
    """Its new owner samples them anew: what this one asked for is dropped, and nobody answered."""
    asking.log.fail_next_commit("run.rollout.0", Fault.BEFORE)
    answer = asking.ask(1)
    tick_until(asking.loop, lambda: asking.loop._pending._aborts.num == 1)
    asking.loop._pending._not_before_s = time.monotonic() + 3600
    other = make_loop(asking.log, HeldStage(), CommitRequests(), ordinal=1)

    def is_gone() -> bool:
        other.tick()
        return not asking.loop._tracker.holds(asking.raw)

    tick_until(asking.loop, is_gone)
    asking.loop._pending._not_before_s = 0.0
    for _ in range(5):
        asking.loop.tick()
    assert not answer.done()
    assert asking.committed() == []


def test_a_zombie_cannot_commit_for_a_partition_that_is_not_its_own(asking: Asking) -> None:
    """Its transaction holds the partition's position, which only the owner may commit."""
    (member,) = asking.log.group("run.rollout").members  # the group drops it, and it does not poll
    del asking.log.group("run.rollout").members[member]
    answer = asking.ask(1)
    with pytest.raises(BrokerError, match="aborted"):
        commit_without_a_poll(asking)
    assert not answer.done()
    assert asking.committed() == []


def commit_without_a_poll(asking: Asking) -> None:
    until_s = time.monotonic() + DEADLINE_S
    while time.monotonic() < until_s:
        asking.loop._pending.announce((), asking.commits.take())
        asking.loop._pending.start()
        asking.loop._pending.settle(0.0)
        time.sleep(0.005)


def test_a_question_wakes_the_loop_at_once(asking: Asking) -> None:
    """Nobody waits for the end of a poll that waits for inputs."""

    async def timed() -> list[float]:
        waited = []
        for number in range(20):
            begun_s = time.monotonic()
            await asking.commits.committed(asking.raw, lambda number=number: [call(number)])
            waited.append(time.monotonic() - begun_s)
            await asyncio.sleep(0.003)
        return waited

    answer = asking.thread.submit(timed())
    tick_until(asking.loop, answer.done)
    assert sorted(answer.result())[10] < IDLE_S / 2


def test_what_is_asked_for_is_sent_in_the_transaction_of_what_is_finished(asking: Asking) -> None:
    """And lies before it: a session's last call before its close."""
    answer = asking.ask(5)
    asking.stage.released = ["0/0"]
    records: list[Sequence[str]] = []
    start = asking.loop._producer.start

    def noted(sent, *of):
        records.append([one.topic for one in sent])
        return start(sent, *of)

    asking.loop._producer.start = noted
    while not asking.commits._new.qsize():
        time.sleep(0.001)
    tick_until(asking.loop, lambda: answer.done() and bool(outputs(asking.log)))
    assert [CALLS.name, TRAJECTORIES.name] in records
    assert [Trajectory] == [type(e) for e in read(MemoryBus(asking.log, "run"), TRAJECTORIES.name)]


def test_owners_that_came_forward_with_a_record_did_not_die_of_it_in_vain(asking: Asking) -> None:
    """A session of hours outlives more workers than a record that kills each of them."""
    for number in range(5):
        answer = asking.ask(number)
        tick_until(asking.loop, answer.done)
        asking.loop.close()
        asking.loop = make_loop(asking.log, asking.stage, asking.commits)
        asking.stage.begun.clear()
        tick_until(asking.loop, lambda: bool(asking.stage.begun))
    assert len(asking.committed()) == 5
    for _ in range(2):  # without a call
        asking.loop.close()
        asking.loop = make_loop(asking.log, asking.stage, asking.commits)
        asking.stage.begun.clear()
        tick_until(asking.loop, lambda: bool(asking.stage.begun))
    asking.loop.close()
    asking.loop = make_loop(asking.log, asking.stage, asking.commits)
    letters = lambda: read(MemoryBus(asking.log, "run"), DEAD_LETTERS.name)  # noqa: E731
    tick_until(asking.loop, lambda: bool(letters()))
