"""A rollout worker whose agent is remote, and runners that are threads with plain HTTP."""

from __future__ import annotations

import http.client
import json
import stat
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from rlstreams.schemas.events import DeadLetter, Trajectory, WorkerReport
from rlstreams.streams.log.topics import (
    DEAD_LETTERS,
    TRAJECTORIES,
    WORKER_EVENTS,
)
from rlstreams.workers.loop.stage import StageLoop
from rlstreams.workers.rollout.session_player import SessionPlayer
from tests.unit.roles.sessions_stand import recorded, worker_of
from tests.unit.roles.stand import Stand, tick_until
from tests.unit.roles.test_turns import EndsTurns

TIMEOUT_S = 60.0
T = TypeVar("T")


@dataclass(frozen=True)
class Answer:
    status: int
    body: dict[str, Any]
    headers: Mapping[str, str]


def post(url: str, key: str, body: object = None) -> Answer:
    place = urlsplit(url)
    path = f"{place.path}?{place.query}" if place.query else place.path
    connection = http.client.HTTPConnection(str(place.hostname), place.port, timeout=TIMEOUT_S)
    try:
        connection.request("POST", path, json.dumps(body or {}), {"authorization": f"Bearer {key}"})
        answer = connection.getresponse()
        text = answer.read()
        return Answer(answer.status, json.loads(text) if text else {}, answer.headers)
    finally:
        connection.close()


@dataclass(frozen=True)
class Session:
    """What a runner was given."""

    given: dict[str, Any]

    def post(self, path: str, body: object = None) -> Answer:
        return post(f"{self.given['base_url']}/{path}", self.given["api_key"], body)

    def say(self, *texts: str) -> Answer:
        messages = [{"role": "user", "content": text} for text in texts]
        return self.post("chat/completions", {"model": "policy", "messages": messages})

    def close(self, **how: str) -> Answer:
        return self.post("close", how)

    @property
    def name(self) -> str:
        return str(self.given["session"])


class World:
    """A worker whose agent is remote; runners are threads, the worker's loop is this one."""

    def __init__(self, folder: Path, num: int = 1, **of_worker: Any) -> None:
        self.stand, self.of_worker = Stand(folder), of_worker
        self.stand.publish(0)
        self.threads = ThreadPoolExecutor(16)
        self.issue("0", num)
        self.loop = self.worker()

    def issue(self, group: str, num: int) -> None:
        if num:
            self.stand.issue(group, num)

    def worker(self) -> StageLoop:
        return worker_of(self.stand, EndsTurns(), None, **self.of_worker)

    @property
    def player(self) -> SessionPlayer:
        stage: Any = self.loop._stage
        player = stage._player
        assert isinstance(player, SessionPlayer)
        return player

    @property
    def told(self) -> dict[str, str]:
        return self.told_to("runner.json")

    def told_to(self, name: str) -> dict[str, str]:
        file = Path(self.stand.config.folder) / "agent" / name
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        return dict(json.loads(file.read_text()))

    def start(self, work: Callable[..., T], *args: Any) -> Future[T]:
        return self.threads.submit(work, *args)

    def done(self, work: Callable[..., T], *args: Any) -> T:
        """What a runner does, while the worker's loop goes round."""
        future = self.start(work, *args)
        tick_until(self.loop, future.done)
        return future.result()

    def ask(self, wait_s: float = 30.0, key: str = "") -> Answer:
        told = self.told
        return post(f"{told['url']}?wait_s={wait_s}", key or told["key"])

    def take(self) -> Session:
        answer = self.done(self.ask)
        assert answer.status == 200, answer
        return Session(answer.body)

    def ticks(self, seconds: float) -> None:
        until_s = time.monotonic() + seconds
        tick_until(self.loop, lambda: time.monotonic() > until_s)

    def until(self, reached: Callable[[], object]) -> None:
        tick_until(self.loop, lambda: bool(reached()))

    @property
    def trajectories(self) -> list[Trajectory]:
        return self.stand.read(TRAJECTORIES.name, Trajectory)

    @property
    def letters(self) -> list[DeadLetter]:
        return self.stand.read(DEAD_LETTERS.name, DeadLetter)

    @property
    def starts(self) -> list[tuple[str, int]]:
        return [(one.session_id, one.start) for one in recorded(self.stand).opened]

    def says(self) -> str:
        report = self.stand.read(WORKER_EVENTS.name, WorkerReport)[-1]
        return f"{report.state} {report.detail}"

    def end(self) -> None:
        self.loop.close()
        self.threads.shutdown()
