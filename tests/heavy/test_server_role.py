"""A worker and the role of its model server: each is killed, and the other goes on."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from rlstreams.schemas.events import NO_VERSION, WorkerReport
from rlstreams.streams.log.codec import outgoing
from rlstreams.streams.log.topics import WORKER_EVENTS
from rlstreams.workers.bootstrap import model_server, served
from rlstreams.workers.bootstrap.addresses import own_urls
from rlstreams.workers.engines.served.engine import ServedEngine
from rlstreams.workers.loop.context import Context
from rlstreams.workers.server import worker as role_module
from rlstreams.workers.server.process import pid_file
from rlstreams.workers.server.worker import ServerEndedError
from rlstreams.workers.weights.channel import WeightError
from tests.contract.engine_rigs import collect, driven, request
from tests.servers.served import model_folder, up
from tests.servers.world import World
from tests.unit.roles.stand import Stand
from tests.waiting import until

ROOT = Path(__file__).parents[2]
START_S = 240.0  # of a Python process with torch, on a busy machine
# In place of a Python with vLLM: a stand-in that listens where it is told. It has one or not.
SERVER = """#!/bin/sh
if [ "$1" = -c ]; then echo '["vllm", "0.32.0", ""]'; exit; fi
while [ "$1" != --port ]; do shift; done
cd {root} && PYTHONPATH=. exec {python} -m tests.servers.serve vllm-0.32.0 "$2" {hangs}
"""


class Run:
    """A run with vLLM, of which a rollout worker and a server are there."""

    def __init__(self, folder: Path) -> None:
        self.hangs = folder / "hangs"  # while it is there, the server hangs of a load
        python = folder / "python"
        python.write_text(SERVER.format(root=ROOT, python=sys.executable, hangs=self.hangs))
        python.chmod(0o700)
        self.stand = Stand(
            folder, model__path=model_folder(folder), rollout__engine="vllm",
            engine__python=python, engine__silent_s=30, engine__start_s=START_S,
        )  # fmt: skip
        self.urls = own_urls(self.stand.config)
        self.log = folder / "logs" / "vllm-0.log"
        self.ends: list[str] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._keep, daemon=True)
        self._thread.start()
        self._pen = self.stand.bus().producer("test")

    def context(self, role: str, instance: str) -> Context:
        return replace(self.stand.context(role), server_urls=self.urls, instance=instance)

    def _keep(self) -> None:
        """Start the role, and start it again, as `up` does."""
        while not self._stop.is_set():
            role = model_server.make_server_role(self.context("server", os.urandom(4).hex()))
            with suppress(ServerEndedError):
                try:
                    while not self._stop.is_set():
                        role.tick()
                except ServerEndedError as err:
                    self.ends.append(str(err))
                    raise
                finally:
                    role.close()

    def engine(self, instance: str) -> ServedEngine:
        """Of one process of the rollout worker."""
        return served.make_served_engine(self.context("rollout", instance))

    @property
    def server_pid(self) -> int:
        return int(pid_file(self.log).read_text())

    def report(self, engine: ServedEngine) -> None:
        """What the worker says of its servers."""
        report = WorkerReport(
            worker="rollout-0", role="rollout", instance="one", state="working", detail="",
            policy_version=0, servers=dict(engine.servers), at_ms=time.time_ns() // 1_000_000,
        )  # fmt: skip
        self._pen.commit([outgoing(WORKER_EVENTS, report)])

    def close(self) -> None:
        self._stop.set()
        self._thread.join(START_S)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """One for all: a start of its server is four CPU seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(role_module, "NEWS_S", 0.1)
        made = Run(tmp_path_factory.mktemp("run"))
        yield made
        made.close()


async def test_the_server_of_a_killed_worker_samples_for_the_next_one(
    run: Run, tmp_path: Path
) -> None:
    """The same process; and no request leaves for it before that one has pulled."""
    world, num_ends = World(tmp_path), len(run.ends)
    async with driven(run.engine("first")) as first:
        await first.pull(world.publish(5), world.channel)
        assert await collect(first, request())
        pid = run.server_pid
    async with driven(run.engine("second")) as second:
        await until(lambda: bool(up(second)), "not met")
        assert NO_VERSION == second.policy_version
        early = asyncio.create_task(collect(second, request()))
        published = world.publish(6)
        assert second.wants(published)
        assert not early.done()
        await second.pull(published, world.channel)
        assert {6} == {segment.policy_version for segment in await early}
    assert pid == run.server_pid
    assert num_ends == len(run.ends)


async def test_a_killed_server_comes_back_shut(run: Run, tmp_path: Path) -> None:
    """Its log is kept, its death is told, and no request meets its random weights."""
    world = World(tmp_path)
    async with driven(run.engine("one")) as engine:
        published = world.publish(0)
        await engine.pull(published, world.channel)
        os.kill(run.server_pid, signal.SIGKILL)
        await until(lambda: not up(engine), "its death was not noticed")
        early = asyncio.create_task(collect(engine, request("1/0/0")))
        await until(lambda: bool(up(engine)), "it was not started again", START_S)
        assert engine.wants(published)
        assert not early.done()
        await engine.pull(published, world.channel)
        assert {s.policy_version for s in await early} == {0}
    assert "SIGKILL" in run.ends[-1]


async def pull_on(engine: ServedEngine, world: World) -> None:
    """One version after the other: the server may see a little later that it is to hang."""
    while True:
        await engine.pull(world.publish(engine.policy_version + 1), world.channel)


async def test_a_server_that_hangs_in_a_load_is_ended_by_its_role(run: Run, tmp_path: Path) -> None:
    """Its front end answers looks; its worker, whose pull it did not answer, says that it hangs."""
    world = World(tmp_path)
    async with driven(run.engine("one")) as engine:
        await engine.pull(world.publish(0), world.channel)
        pid, server = run.server_pid, engine._servers[0]
        usual = server._settings
        run.hangs.touch()
        server._settings = replace(usual, pull_s=2.0)
        server._delivery._probe_s = 2.0
        with pytest.raises(WeightError):
            await pull_on(engine, world)
        server._settings, server._delivery._probe_s = usual, usual.silent_s
        assert NO_VERSION == engine.policy_version
        run.report(engine)
        early = asyncio.create_task(collect(engine, request("1/0/0")))
        await until(lambda: bool(up(engine)), "it was not started again", START_S)
        assert pid != run.server_pid
        assert not early.done()
        await engine.pull(world.publish(9), world.channel)
        assert {9} == {s.policy_version for s in await early}
    assert "hangs, says rollout-0" in run.ends[-1]
