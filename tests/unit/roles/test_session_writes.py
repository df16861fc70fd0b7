"""Calls are written outside of transactions: who lost a session changes nothing by writing on."""

from __future__ import annotations

import asyncio
import os
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from rlstreams.schemas.events import CallCommitted, PolicyLoaded, Trajectory
from rlstreams.streams.log.errors import OutcomeUnknownError
from rlstreams.streams.log.record import Partition
from rlstreams.streams.log.topics import CALLS, POLICY_PULLS, PROMPTS, TRAJECTORIES
from rlstreams.streams.sessions.fold import SessionLog
from rlstreams.workers.rollout.history import History
from tests.memory.bus import MemoryAppender
from tests.memory.log import Fault
from tests.unit.roles.sessions_stand import Client, ScriptedAgent, recorded, request_of, worker_of
from tests.unit.roles.stand import DEADLINE_S, Stand, tick_until
from tests.unit.roles.test_turns import EndsTurns

NUM = 3  # calls of a session


class Worker:
    """Its agent makes two calls, and the third when it may."""

    def __init__(self, stand: Stand, *, may_go_on: bool) -> None:
        self.stand, self.engine, self.may_go_on = stand, EndsTurns(), may_go_on
        self.loop = worker_of(stand, self.engine, ScriptedAgent(self._script))
        self.consumer: Any = self.loop._consumer

    async def _script(self, client: Client) -> None:
        await client.say("1")
        await client.say("10")
        while not self.may_go_on:  # noqa: ASYNC110  (set on another thread)
            await asyncio.sleep(0.001)
        await client.say("11")


def written(stand: Stand) -> list[CallCommitted]:
    return stand.read(CALLS.name, CallCommitted)


def until_written(stand: Stand, num: int) -> None:
    until_s = time.monotonic() + DEADLINE_S
    while len(written(stand)) < num:
        assert time.monotonic() < until_s, f"{len(written(stand))} of {num} calls"
        time.sleep(0.001)


def folded(stand: Stand) -> Any:
    log = SessionLog()
    for event in stand.read(CALLS.name, object):
        log.apply(event)
    return log.get("0/0")


@pytest.fixture
def stand(tmp_path: Path) -> Stand:
    stand = Stand(tmp_path)
    stand.publish(0)
    stand.issue("0", 1)
    return stand


@pytest.fixture
def lost(stand: Stand) -> Worker:
    """A worker whose group dropped it behind its back, two calls into a session."""
    worker = Worker(stand, may_go_on=False)
    tick_until(worker.loop, lambda: len(written(stand)) == 2)
    worker.consumer.expel()
    return worker


def is_over(stand: Stand) -> bool:
    return bool(stand.read(TRAJECTORIES.name, Trajectory))


def test_behind_the_next_opening_a_lost_session_counts_no_more(stand: Stand, lost: Worker) -> None:
    """The call that it writes there is in the log, and void."""
    owner = Worker(stand, may_go_on=True)
    tick_until(owner.loop, lambda: is_over(stand))
    before = folded(stand)
    lost.may_go_on = True
    until_written(stand, NUM + 1)
    after = folded(stand)
    assert after.num_void == 1
    assert after.calls == before.calls
    assert len(owner.engine.requests) == 1  # the first two were answered from the log
    for worker in (lost, owner):
        worker.loop.close()


def test_before_it_what_is_written_meanwhile_is_answered_from_the_log(
    stand: Stand, lost: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The new owner has read all that there was, and then the old one writes one more."""
    take = History.take

    def takes(history: History, record: Any) -> Any:
        session = take(history, record)
        lost.may_go_on = True
        until_written(stand, NUM)
        return session

    monkeypatch.setattr(History, "take", takes)
    owner = Worker(stand, may_go_on=True)
    tick_until(owner.loop, lambda: is_over(stand))
    assert owner.engine.requests == []
    assert [one.call_id for one in recorded(stand).replays] == [c.call_id for c in written(stand)]
    assert (len(written(stand)), folded(stand).num_void) == (NUM, 0)
    for worker in (lost, owner):
        worker.loop.close()


def test_a_call_of_several_parts_is_whole_or_not_there(stand: Stand) -> None:
    """So a transaction carries it."""

    async def large(client: Client) -> None:
        ask = [{"role": "user", "content": "1"}]
        request = request_of(ask, body=os.urandom(2_000_000))
        await client.open_sessions.call(client.start.key, request)

    loop = worker_of(stand, EndsTurns(), ScriptedAgent(large))
    tick_until(loop, lambda: is_over(stand))
    loop.close()
    (call,) = written(stand)
    assert len(call.request) >= 2_000_000


def test_a_call_in_the_log_is_work_that_nobody_died_of(stand: Stand, lost: Worker) -> None:
    """So the worker's own try, which was noted before, is taken back; once is enough."""
    tracker = lost.loop._tracker[Partition(PROMPTS.name, 0)]
    assert tracker.tries == 0
    lost.loop.close()


def test_a_call_whose_place_is_unknown_ends_the_worker(stand: Stand) -> None:
    """The next one finds it, and answers from the log."""
    stand.log.fail_next_append(Fault.AFTER)
    dies = Worker(stand, may_go_on=True)
    with pytest.raises(OutcomeUnknownError):
        tick_until(dies.loop, lambda: is_over(stand))
    dies.loop.close()
    assert len(written(stand)) == 1
    follows = Worker(stand, may_go_on=True)
    tick_until(follows.loop, lambda: is_over(stand))
    follows.loop.close()
    assert (len(written(stand)), len(follows.engine.requests)) == (NUM, NUM - 1)


def test_a_call_waits_for_the_record_of_the_load_that_it_names(
    stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A version came in the middle of the session, and its `PolicyLoaded` is not committed yet."""
    worker = Worker(stand, may_go_on=False)
    tick_until(worker.loop, lambda: len(written(stand)) == 2)
    tick_until(worker.loop, lambda: not worker.loop._pending.is_under_way)
    with monkeypatch.context() as held_up:
        held_up.setattr(worker.loop._pending, "start", lambda *_, **__: False)
        stand.publish(1)
        tick_until(worker.loop, lambda: worker.engine.policy_version == 1)
        worker.may_go_on = True
        tick_until(worker.loop, lambda: len(worker.engine.requests) == NUM)
        until_s = time.monotonic() + 0.2
        tick_until(worker.loop, lambda: time.monotonic() > until_s)
        assert len(written(stand)) == 2
    tick_until(worker.loop, lambda: is_over(stand))
    worker.loop.close()
    (load,) = (e for e in stand.read(POLICY_PULLS.name, PolicyLoaded) if e.policy_version == 1)
    assert written(stand)[-1].segments[-1].load_id == load.load_id


def test_no_answer_leaves_before_its_record_is_acknowledged(
    stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The broker has it and has not said so: the agent waits."""
    append, held, heard = MemoryAppender.append, list[tuple[Any, Any]](), list[str]()

    def slowly(appender: MemoryAppender, record: Any) -> Any:
        held.append((Future(), append(appender, record)))
        return held[-1][0]

    async def script(client: Client) -> None:
        heard.append((await client.say("1")).call_id)

    monkeypatch.setattr(MemoryAppender, "append", slowly)
    loop = worker_of(stand, EndsTurns(), ScriptedAgent(script))
    tick_until(loop, lambda: len(held) == 1)
    until_s = time.monotonic() + 0.2
    tick_until(loop, lambda: time.monotonic() > until_s)
    assert heard == []
    acknowledged, written_at = held[0]
    acknowledged.set_result(written_at.result())
    tick_until(loop, lambda: is_over(stand))
    loop.close()
    assert heard == [call.call_id for call in written(stand)]
