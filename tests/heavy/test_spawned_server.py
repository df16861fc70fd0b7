"""A server that the worker started: minded, started again, ended with the worker."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rlstreams.workers.bootstrap.served import free_port
from rlstreams.workers.engines.served.command import StartCommand
from rlstreams.workers.engines.served.delivery import FolderDelivery
from rlstreams.workers.engines.served.engine import ServedEngine
from rlstreams.workers.engines.served.process import ServerProcess, pid_file
from rlstreams.workers.engines.served.server import Server
from rlstreams.workers.engines.served.shape import longest_sequence, read_shape
from rlstreams.workers.model.base import EngineError
from tests.contract.engine_rigs import collect, driven, request
from tests.servers.served import model_folder, settings, up
from tests.servers.world import World
from tests.waiting import until

ROOT = Path(__file__).parents[2]
START_S = 240.0  # of a Python process with torch, on a busy machine


def command(port: int, *files: Path) -> StartCommand:
    argv = (sys.executable, "-m", "tests.servers.serve", "vllm-0.32.0", str(port))
    argv += tuple(str(file) for file in files)
    return StartCommand(argv=argv, environment={"PYTHONPATH": str(ROOT)})


class Spawned:
    """An engine with one server of its own."""

    def __init__(
        self,
        folder: Path,
        argv: tuple[str, ...] = (),
        hangs: Path | None = None,
        locks: tuple[Path, ...] = (),
        notes: list[str] | None = None,
    ) -> None:
        """Args: hangs: while this file is there, the server hangs of a load."""
        port = free_port("127.0.0.1")
        self.notes: list[str] = [] if notes is None else notes
        start = command(port) if hangs is None else command(port, hangs)
        if argv:
            start = StartCommand(argv=argv, environment={})
        self.process = ServerProcess(start, folder / "server.log", locks)
        model = model_folder(folder)
        chosen = settings("vllm", silent_s=2.0, start_s=START_S)
        shape = read_shape(model)
        server = Server(
            f"http://127.0.0.1:{port}", chosen, shape, FolderDelivery(model, folder / "versions")
        )
        self.engine = ServedEngine(
            chosen, shape, longest_sequence(model), [(server, self.process)], self.notes.append
        )

    @property
    def server_pid(self) -> int:
        """Of the server itself, the child of its guard."""
        return int(pid_file(self.process.log).read_text())


def is_alive(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False


async def test_a_killed_server_is_started_again_and_shut_until_it_pulled(tmp_path: Path) -> None:
    """Its log is kept, its death is told, and no request meets its random weights."""
    world, spawned = World(tmp_path), Spawned(tmp_path)
    async with driven(spawned.engine) as engine:
        published = world.publish(0)
        await engine.pull(published, world.channel)
        assert await collect(engine, request())
        spawned.process._started_s -= 10 * START_S  # it had run for longer than a start may take
        os.kill(spawned.server_pid, signal.SIGKILL)
        await until(lambda: not up(engine), "its death was not noticed")
        early = asyncio.create_task(collect(engine, request("1/0/0")))
        await until(lambda: bool(up(engine)), "it was not started again", START_S)
        assert engine.wants(published)
        assert not early.done()
        await engine.pull(published, world.channel)
        assert {s.policy_version for s in await early} == {0}
        assert any("status 137" in note for note in spawned.notes)
    assert not spawned.process.is_running


async def test_a_server_that_cannot_start_is_told_with_its_last_lines(tmp_path: Path) -> None:
    """After some starts the worker is told, and ends with the reason."""
    script = "import sys; print('no room on the device', file=sys.stderr); sys.exit(3)"
    spawned = Spawned(tmp_path, (sys.executable, "-c", script))
    async with driven(spawned.engine) as engine:
        world = World(tmp_path)
        with pytest.raises(EngineError, match=r"3 starts failed.*status 3") as caught:
            await engine.pull(world.publish(0), world.channel)
        assert "no room on the device" in str(caught.value)


def test_a_server_ends_with_its_worker_however_that_went(tmp_path: Path) -> None:
    """SIGKILL closes the worker's pipe as any other end does."""
    port = free_port("127.0.0.1")
    script = (
        "import os, sys, time\n"
        "from pathlib import Path\n"
        "from tests.heavy.test_spawned_server import command\n"
        "from rlstreams.workers.engines.served.process import ServerProcess\n"
        f"process = ServerProcess(command({port}), Path({str(tmp_path / 'log')!r}))\n"
        "process.start()\n"
        "print(process._owned._process.pid, flush=True)\n"
        "time.sleep(3600)\n"
    )
    worker = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    guard = int(worker.stdout.readline())
    worker.kill()
    worker.wait()
    until_s = time.monotonic() + START_S
    while is_alive(guard):
        assert time.monotonic() < until_s, "the server outlived its worker"
        time.sleep(0.05)
    worker.stdout.close()
