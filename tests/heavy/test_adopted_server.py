"""A worker that is killed or stopped while it samples from a server of its own."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlstreams.schemas.events import NO_VERSION
from rlstreams.workers.bootstrap import served
from rlstreams.workers.config.load import load
from rlstreams.workers.engines.served.engine import ServedEngine
from rlstreams.workers.engines.served.process import end_left_servers, pid_file
from rlstreams.workers.loop.context import Context
from tests.contract.engine_rigs import collect, driven, request
from tests.heavy.test_spawned_server import ROOT, START_S, is_alive
from tests.logs import made_log
from tests.memory.bus import MemoryBus
from tests.servers.served import model_folder, up
from tests.servers.world import World
from tests.unit.roles.stand import EXAMPLE
from tests.waiting import until

# In place of a Python with vLLM: a stand-in that listens where it is told.
SERVER = """#!/bin/sh
while [ "$1" != --port ]; do shift; done
cd {root} && PYTHONPATH=. exec {python} -m tests.servers.serve vllm-0.32.0 "$2"
"""


def engine_of(folder: Path) -> ServedEngine:
    """Of a rollout worker of the run in `folder`."""
    python = folder / "python"
    python.write_text(SERVER.format(root=ROOT, python=sys.executable))
    python.chmod(0o700)
    where = served.Where(python=str(python), version="0.32.0")
    words = [f"run.dir={folder}", f"model.path={model_folder(folder)}", "rollout.engine=vllm"]
    bus = MemoryBus(made_log("demo"), "demo")
    config = load([EXAMPLE], words)
    context = Context(config=config, bus=bus, role="rollout", ordinal=0, instance="one")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(served, "where_installed", lambda *_: where)
        return served.make_served_engine(context)


async def work(folder: Path) -> None:
    """A worker that samples under version 5, and says so."""
    async with driven(engine_of(folder)) as engine:
        world = World(folder / "worker")
        await engine.pull(world.publish(5), world.channel)
        assert await collect(engine, request())
        sys.stdout.write("sampled\n")
        sys.stdout.flush()
        await asyncio.sleep(START_S)


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    script = (
        f"from tests.heavy.test_adopted_server import *; asyncio.run(work(Path({str(tmp_path)!r})))"
    )
    started = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    with started:
        assert "sampled\n" == started.stdout.readline()
        yield started
        started.kill()
    end_left_servers(tmp_path / "logs")


async def test_the_server_of_a_killed_worker_samples_for_the_next_one(
    worker: subprocess.Popen[str], tmp_path: Path
) -> None:
    """The same process, and only once it has pulled; it ends with its second worker's good end."""
    file = pid_file(tmp_path / "logs" / "vllm-0.log")
    pid = int(file.read_text())
    worker.kill()
    worker.wait()
    async with driven(engine_of(tmp_path)) as engine:
        await until(lambda: bool(up(engine)), "not adopted")
        assert NO_VERSION == engine.policy_version
        early = asyncio.create_task(collect(engine, request()))
        world = World(tmp_path)
        published = world.publish(6)
        assert engine.wants(published)
        assert not early.done()
        await engine.pull(published, world.channel)
        assert {6} == {segment.policy_version for segment in await early}
        assert pid == int(file.read_text())
    assert not is_alive(pid)
    assert not file.exists()


async def test_a_stopped_worker_keeps_its_server(
    worker: subprocess.Popen[str], tmp_path: Path
) -> None:
    """Woken, it would pull a version into what another one samples from. Its successor starts a
    server at another address; once the sleeper is killed, its own has nobody and ends at once."""
    file = pid_file(tmp_path / "logs" / "vllm-0.log")
    pid = int(file.read_text())
    worker.send_signal(signal.SIGSTOP)
    async with driven(engine_of(tmp_path)):
        await until(lambda: int(file.read_text()) != pid, "it started none of its own")
        other = int(file.read_text())
        assert is_alive(pid)
        os.kill(worker.pid, signal.SIGKILL)
        await until(lambda: not is_alive(pid), "it outlived its worker")
        assert other == int(file.read_text())
