"""A server whose worker died: who may have it, for how long, and when it is not adopted.

`release` is what the kernel does at a worker's death; a real one dies in
`tests/heavy/test_adopted_server.py`.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rlstreams.workers.bootstrap import served
from rlstreams.workers.bootstrap.served import Where, make_served_engine
from rlstreams.workers.config.load import load
from rlstreams.workers.engines.served.command import StartCommand
from rlstreams.workers.engines.served.delivery import FolderDelivery
from rlstreams.workers.engines.served.engine import ServedEngine
from rlstreams.workers.engines.served.process import (
    ServerProcess,
    end_left_servers,
    left_server,
    pid_file,
)
from rlstreams.workers.engines.served.server import Server
from rlstreams.workers.engines.served.shape import longest_sequence, read_shape
from rlstreams.workers.loop.context import Context
from tests.contract.engine_rigs import collect, driven, request
from tests.logs import made_log
from tests.memory.bus import MemoryBus
from tests.servers.served import STAND_IN_BEAT_S, model_folder, settings, up
from tests.servers.world import World
from tests.unit.roles.stand import EXAMPLE
from tests.waiting import until

LONG_S = 600.0
SLEEPING = StartCommand(argv=(sys.executable, "-c", "import time; time.sleep(600)"), environment={})


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Path]:
    """Of a server; none that a test left outlives it."""
    found = tmp_path / "logs" / "vllm-0.log"
    yield found
    end_left_servers(found.parent)


def started(log: Path, *, grace_s: float = LONG_S, note: str = "note") -> tuple[ServerProcess, int]:
    """A server that runs, and its process id."""
    process = ServerProcess(SLEEPING, log, note=note, grace_s=grace_s)
    process.start()
    seen(pid_file(log).exists, "its guard wrote no process id")
    return process, int(pid_file(log).read_text())


def die(process: ServerProcess) -> None:
    """Its worker, without a word."""
    process._owned.release()


def seen(reached: Callable[[], bool], what: str) -> None:
    until_s = time.monotonic() + 60.0
    while not reached():
        assert time.monotonic() < until_s, what
        time.sleep(0.005)


def is_there(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize("grace_s", [0.0, 0.3])
def test_a_server_that_nobody_takes_over_ends(log: Path, grace_s: float) -> None:
    """At once, where no worker is to have it; its files go with it."""
    process, pid = started(log, grace_s=grace_s)
    died_s = time.monotonic()
    die(process)
    seen(lambda: not is_there(pid), "it outlived the grace")
    assert time.monotonic() - died_s >= grace_s
    process.close()
    assert ["vllm-0.log"] == [path.name for path in log.parent.iterdir()]


def test_a_server_has_one_owner_at_a_time(log: Path) -> None:
    """Its worker as long as that lives, stopped or not; then the first who comes."""
    process, pid = started(log)
    assert left_server(log) is None
    die(process)
    first = left_server(log)
    assert "note" == first.note
    assert left_server(log) is None
    assert first.poll() is None
    os.kill(pid, signal.SIGKILL)
    seen(lambda: first.poll() is not None, "its end is not told")
    assert 137 == first.poll()
    first.release()
    assert left_server(log) is None
    process.close()


def test_a_worker_that_ends_in_good_order_ends_its_server(log: Path) -> None:
    """Also one that it adopted."""
    process, pid = started(log)
    process.close()
    assert not is_there(pid)
    process, pid = started(log)
    die(process)
    successor = ServerProcess(SLEEPING, log, grace_s=LONG_S, left=left_server(log))
    assert successor.is_running
    successor.close()
    assert not is_there(pid)
    process.close()


def test_the_server_of_a_stopped_worker_stays_its_own(log: Path) -> None:
    """Its successor starts another one; nobody could find the first by then, so it has no grace,
    and leaves the files of the second."""
    stopped, first = started(log)
    assert left_server(log) is None
    pid_file(log).unlink()  # for `started` to wait for the second
    successor, second = started(log)
    assert is_there(first)
    die(stopped)
    seen(lambda: not is_there(first), "a server that nobody can take over lives on")
    assert second == int(pid_file(log).read_text())
    die(successor)
    found = left_server(log)
    found.close(60.0)
    assert not is_there(second)
    stopped.close()
    successor.close()


def test_a_run_that_is_over_leaves_no_server(log: Path) -> None:
    """But those of workers that live. Also in a folder whose name no socket's address can hold."""
    deep = log.parent / ("long" * 40)
    one, left = started(deep / "vllm-0.log")
    other, kept = started(deep / "vllm-1.log")
    die(one)
    end_left_servers(deep)
    assert not is_there(left)
    assert is_there(kept)
    other.close()
    one.close()


def engine_of(
    folder: Path, monkeypatch: pytest.MonkeyPatch, notes: list[str], *words: str
) -> ServedEngine:
    """As a rollout worker makes it; its server sleeps."""
    python = folder / "python"
    python.write_text("#!/bin/sh\nexec sleep 600\n")
    python.chmod(0o700)
    where = Where(python=str(python), version="0.32.0")
    monkeypatch.setattr(served, "where_installed", lambda *_: where)

    class Log:
        def info(self, _: str, what: str) -> None:
            notes.append(what)

    monkeypatch.setattr(Context, "log", Log())
    config = load([EXAMPLE], [f"run.dir={folder}", "rollout.engine=vllm", *words])
    return make_served_engine(
        Context(
            config=config, bus=MemoryBus(made_log("demo"), "demo"), role="rollout", ordinal=0,
            instance="one",
        )
    )  # fmt: skip


@pytest.mark.parametrize("words", [(), ("engine.env.A=1",)])
def test_only_what_was_started_in_the_same_way_is_adopted(
    tmp_path: Path, log: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    """It keeps its address; another one is ended before its successor starts, and that is told."""
    notes: list[str] = []
    one = engine_of(tmp_path, monkeypatch, notes)
    process = one._monitors[0]._process
    process.start()
    seen(pid_file(log).exists, "not started")
    pid = int(pid_file(log).read_text())
    die(process)

    async def main() -> None:
        other = engine_of(tmp_path, monkeypatch, notes, *words)
        await other.start()
        successor = other._monitors[0]._process
        try:
            if not words:
                assert one._servers[0].url == other._servers[0].url
                assert successor.is_serving
                assert [] == notes
                return
            assert not successor.is_serving
            assert "was started with another command" in notes[0]
            await until(lambda: any("is being started" in note for note in notes), "not replaced")
            assert not is_there(pid)
            assert 0 == successor.num_failures
        finally:
            await other.close()
        assert not is_there(pid)

    asyncio.run(main())
    process.close()
    asyncio.run(one.close())


@pytest.mark.parametrize("trouble", ["", "its engine hangs", "it starts", "another starts"])
async def test_a_server_is_adopted_if_it_answers(world: World, log: Path, trouble: str) -> None:
    """What it held does not count, and what it was asked is ended. One that was starting is waited
    for, unless another server sizes its cache by the same memory."""
    server = world.serve()
    process, pid = started(log)
    die(process)
    lock = log.with_suffix(".lock")
    other = ServerProcess(SLEEPING, log.with_name("other.log"), [lock])
    successor = ServerProcess(SLEEPING, log, [lock], grace_s=LONG_S, left=left_server(log))
    model, chosen = model_folder(world.folder), settings("vllm", beat_s=STAND_IN_BEAT_S)
    chosen = settings("vllm", beat_s=STAND_IN_BEAT_S, answer_s=0.2) if trouble else chosen
    shape, notes = read_shape(model), list[str]()
    delivery = FolderDelivery(model, world.folder / "versions")
    pair = Server(server.url, chosen, shape, delivery), successor
    engine = ServedEngine(chosen, shape, longest_sequence(model), [pair], notes.append)
    server.is_stuck = trouble == "its engine hangs"
    if "starts" in trouble:
        server.kill()
    if trouble == "another starts":
        assert other.take_turn()
    async with driven(engine):
        if trouble in ("its engine hangs", "another starts"):
            await until(lambda: bool(notes), "not given up")
            assert "not adopted from its last worker: " in notes[0]
            expected = "no answer within" if server.is_stuck else str(lock)
            assert expected in notes[0]
            await until(lambda: not is_there(pid), "it was not ended")
        else:
            if trouble:
                await until(lambda: bool(successor._held), "its GPU is free for others")
                server.restart()
            await until(lambda: bool(up(engine)), "not adopted")
            assert f"server {server.url} is adopted from its last worker" in notes[0]
            assert "/pause?mode=abort&clear_cache=true" in server.called
            assert not successor._held
            early = asyncio.create_task(collect(engine, request()))
            published = world.publish(3)
            assert engine.wants(published)
            assert not early.done()
            await engine.pull(published, world.channel)
            assert {3} == {segment.policy_version for segment in await early}
            assert is_there(pid)
    assert not is_there(pid)
    other.close()
    other.end_turn()
    process.close()
