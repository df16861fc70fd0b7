"""A session of a client from outside that goes to another worker with its partition."""

from __future__ import annotations

import asyncio
import json
import time
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from rlstreams.workers.engines.base import GeneratedSegment, SampleRequest
from rlstreams.workers.loop.stage import StageLoop
from tests.unit.roles.remote_stand import Answer, Session, World
from tests.unit.roles.sessions_stand import recorded, worker_of
from tests.unit.roles.stand import DEADLINE_S
from tests.unit.roles.test_outside import ask
from tests.unit.roles.test_turns import EndsTurns


class Two(World):
    """A worker with a session in each of two partitions, and one that joins and takes one."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, num=1, outside=True, by_agent=True, lease_s=60.0)
        self.stand.issue("1", 1, partition=1)
        self.workers = [self.loop]
        sessions = [self.done(ask, self, group) for group in ("a", "b")]
        self.sessions = {one.name: one for one in (Session(s.body) for s in sessions)}

    def join(self) -> StageLoop:
        self.workers.append(worker_of(self.stand, EndsTurns(), None, ordinal=1, **self.of_worker))
        return self.workers[-1]

    def tick_until(self, reached: Callable[[], object], *workers: StageLoop) -> None:
        until_s = time.monotonic() + DEADLINE_S
        while not reached():
            assert time.monotonic() < until_s, "not reached in time"
            for worker in workers or self.workers:
                worker.tick()

    def heard(self, work: Callable[..., Any], *args: Any) -> Any:
        future = self.start(work, *args)
        self.tick_until(future.done)
        return future.result()

    def moved(self) -> Session:
        """The session that the second worker has, once it was opened there."""
        self.tick_until(lambda: [one for one in self.starts if one[1] == 1])
        [name] = [name for name, start in self.starts if start == 1]
        return self.sessions[name]

    def end(self) -> None:
        for worker in self.workers:
            worker.close()
        self.threads.shutdown()


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Two]:
    made = Two(tmp_path)
    yield made
    made.end()


def patient(work: Callable[..., Answer], *args: Any) -> Answer:
    """As a client is that is told to come again."""
    while (answer := work(*args)).status == 503:
        assert int(answer.headers["retry-after"]) == 1
        time.sleep(0.05)
    return answer


def test_a_client_goes_on_where_its_session_went(two: Two) -> None:
    """At the address that it was given: the worker there passes on what it asks, and the answers,
    until the session is over; and the other session stays."""
    said = {name: two.heard(session.say, "1").body for name, session in two.sessions.items()}
    two.join()
    moved = two.moved()
    answer = two.heard(patient, moved.say, "1")
    assert (answer.status, answer.body["choices"]) == (200, said[moved.name]["choices"])
    assert answer.headers["x-rlstreams-call"] == said[moved.name]["id"].rpartition("-")[2]
    more = {
        "messages": [
            {"role": "user", "content": "1"},
            answer.body["choices"][0]["message"],
            {"role": "user", "content": "2"},
        ],
        "stream": True,
    }
    assert two.heard(_streamed, moved, more).endswith(b"data: [DONE]\n\n")
    for session in two.sessions.values():
        assert 200 == two.heard(patient, session.post, "outcome", {"reward": 1.0}).status
        assert 200 == two.heard(patient, session.close).status
    two.tick_until(lambda: len(two.trajectories) == 2)
    assert 410 == two.heard(moved.say, "2").status
    calls = [call for call in recorded(two.stand).calls if call.session_id == moved.name]
    assert [call.worker for call in calls] == ["rollout-0", "rollout-1"]
    assert [call.parent for call in calls] == [None, calls[0].call_id]


def _streamed(session: Session, body: dict[str, Any]) -> bytes:
    key = {"authorization": f"Bearer {session.given['api_key']}"}
    url = f"{session.given['base_url']}/chat/completions"
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), key)) as got:
        return bytes(got.read())


def test_what_is_under_way_then_is_no_end(two: Two) -> None:
    """A call that the move cuts is told to come again, and is the same call at the other worker;
    one that comes while nobody has the session waits for it."""
    stage: Any = two.loop._stage
    sampled, drawn = stage._engine.generate, []

    async def stuck(request: SampleRequest) -> AsyncIterator[GeneratedSegment]:
        drawn.append(request)
        await stage._never.wait()
        async for segment in sampled(request):
            yield segment

    stage._never, stage._engine.generate = asyncio.Event(), stuck
    cut = {name: two.start(session.say, "1") for name, session in two.sessions.items()}
    two.tick_until(lambda: len(drawn) == 2)
    other = two.join()
    two.tick_until(lambda: any(one.done() for one in cut.values()))
    [name] = [name for name, one in cut.items() if one.done()]
    assert (cut[name].result().status, cut[name].result().body["error"]["code"]) == (503, "moving")
    waits: Future[Answer] = two.start(two.sessions[name].say, "1")
    assert 200 == two.heard(waits.result).status
    engine: Any = other._stage._engine  # type: ignore[attr-defined]
    assert [one.sample_id for one in engine.requests] == [
        one.sample_id for one in drawn if one.sample_id.startswith(name)
    ]
