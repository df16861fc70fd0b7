"""Role `server`: its model server starts, is looked at, and ends with it, however that goes."""

from __future__ import annotations

import http.server
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlstreams.schemas.events import WorkerReport
from rlstreams.streams.broker.ports import free_port
from rlstreams.streams.leases import FREE, GRANTED, HELD, LOST, RELEASED, Lease
from rlstreams.streams.log.codec import outgoing
from rlstreams.streams.log.errors import BrokerError, ConfigError, FencedError, OutcomeUnknownError
from rlstreams.streams.log.topics import WORKER_EVENTS
from rlstreams.workers.engines.served.command import StartCommand
from rlstreams.workers.engines.served.states import State
from rlstreams.workers.server import worker as module
from rlstreams.workers.server.process import (
    HealthLooks,
    MemoryLock,
    ServerProcess,
    pid_file,
    start_locks,
)
from rlstreams.workers.server.worker import Patience, ServerEndedError, ServerWorker
from tests.proc import is_alive
from tests.unit.roles.stand import Stand

LIMIT_S = 60.0
# Answers /health with what the file says; with `late` it listens once that file is there.
SCRIPT = """
import http.server, pathlib, sys, time
port, status, child, late = int(sys.argv[1]), *map(pathlib.Path, sys.argv[2:5])
import subprocess
found = subprocess.Popen(["sleep", "600"])
child.write_text(str(found.pid))
while not late.exists():
    time.sleep(0.01)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        said = status.read_text() if status.exists() else "200"
        if said == "silent":
            time.sleep(600)
        self.send_response(int(said)); self.end_headers()
    def log_message(self, *_):
        pass
print("it listens", flush=True)
http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


class World:
    """One server role, and what it meets."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.stand = Stand(folder, deadlines__drain_s=5)
        self.status, self.late, self.below = folder / "status", folder / "late", folder / "below"
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self.late.touch()
        self.locks: list[Path] = []
        self.patience = Patience(start_s=LIMIT_S, silent_s=LIMIT_S, beat_s=0.02, look_s=0.2)
        self.made: list[ServerWorker] = []
        self.pen = self.stand.bus().producer("test")

    def command(self, *words: str) -> StartCommand:
        port = self.url.rpartition(":")[2]
        files = (str(self.status), str(self.below), str(self.late))
        return StartCommand(
            argv=words or (sys.executable, "-c", SCRIPT, port, *files), environment={}
        )

    def role(self, *words: str, is_shared: bool = False, ordinal: int = 0) -> ServerWorker:
        """A new life of it."""
        memory = MemoryLock(self.folder / "memory.lock") if is_shared else None
        log = self.folder / "logs" / f"vllm-{ordinal}.log"
        process = ServerProcess(self.command(*words), log, self.locks, memory)
        looks = HealthLooks(self.url, {200}, self.patience.beat_s, self.patience.look_s)
        context = self.stand.context("server", ordinal)
        made = ServerWorker(
            context, self.url, process, looks, self.patience, name="vllm/0", is_shared=is_shared
        )
        self.made.append(made)
        return made

    def says(self, state: State, *, worker: str = "rollout-0", instance: str = "one") -> None:
        """A rollout worker, of the server."""
        report = WorkerReport(
            worker=worker, role="rollout", instance=instance, state="working", detail="",
            policy_version=0, servers={self.url: str(state)},
        )  # fmt: skip
        self.pen.commit([outgoing(WORKER_EVENTS, report)])

    def reports(self) -> list[WorkerReport]:
        found = self.stand.read(WORKER_EVENTS.name, WorkerReport)
        return [event for event in found if event.role == "server"]


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.setattr(module, "POLL_S", 0.01)
    made = World(tmp_path)
    yield made
    for role in made.made:
        role._process.end()
        role._looks.close()


def until(role: ServerWorker, seen: Callable[[], object], why: str) -> None:
    until_s = time.monotonic() + LIMIT_S
    while not seen():
        assert time.monotonic() < until_s, why
        role.tick()


def started(world: World, **options: Any) -> tuple[ServerWorker, int]:
    """One that serves, and the process id of its server."""
    role = world.role(**options)
    if options.get("is_shared"):
        role.follow(lease(GRANTED))
    until(role, lambda: role._ready_s is not None, "not ready")
    role.tick()
    return role, int(pid_file(role._process.log).read_text())


def lease(state: str, *, shift: int = 1, ended: str = "", instance: str = "one") -> Lease:
    return Lease(shift=shift, state=state, holder="rollout-0", instance=instance, ended=ended)


def test_it_says_what_it_does_and_that_it_came_so_far(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`up` takes a version that a worker's pull brought for work, not that the server answered: it
    answers before each first pull that ends it."""
    monkeypatch.setattr(module, "NEWS_S", 0.05)
    world.late.unlink()
    role = world.role()
    until(role, lambda: role._process.child, "not started")
    role.tick()
    world.late.touch()
    until(role, lambda: role._ready_s is not None, "not ready")
    until(role, lambda: world.reports()[-1].state == "serving", "not told")
    first, last = world.reports()[0], world.reports()[-1]
    assert ("starting", {}) == (first.state, first.counters)
    assert f"vllm/0 at {world.url}" == last.detail
    assert {"server_starts": 1.0} == last.counters
    time.sleep(0.1)
    world.says(State.PULLING)
    role.tick()
    assert "served" not in world.reports()[-1].counters
    for _ in range(2):
        world.says(State.SERVING)
        until(role, lambda: "served" in world.reports()[-1].counters, "it is of no use")
    assert {"server_starts": 1.0, "served": 1.0} == world.reports()[-1].counters
    role.drain()
    until(role, lambda: role.done, "it does not drain")
    role.close()
    assert "stopped" == world.reports()[-1].state
    assert not pid_file(role._process.log).exists()


def test_it_ends_with_its_server_and_says_why(world: World) -> None:
    role, pid = started(world)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(ServerEndedError, match=rf"server {world.url} .*SIGKILL") as caught:
        until(role, lambda: False, "")
    assert "it listens" in str(caught.value)
    assert "vllm-0.log" in str(caught.value)


def test_a_server_that_cannot_be_started_is_told_with_its_last_lines(world: World) -> None:
    script = "import sys; print('no room on the device', file=sys.stderr); sys.exit(3)"
    role = world.role(sys.executable, "-c", script)
    with pytest.raises(ServerEndedError, match="no room on the device"):
        until(role, lambda: False, "")
    role = world.role("/no/such/python", ordinal=1)
    with pytest.raises(ServerEndedError, match=f"server {world.url} cannot be started.*/no/such"):
        until(role, lambda: False, "")


@pytest.mark.parametrize("how", ["starts for ever", "is silent", "hangs"])
def test_what_is_of_no_use_is_ended(
    world: World, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each by a limit that is named; that its engine hangs, its workers say."""
    monkeypatch.setattr(module, "NEWS_S", 0.05)
    if how == "starts for ever":
        world.status.write_text("503")
        role, expected = world.role(), r"not ready within 0\.5 s \(engine\.start_s\)"
        until(role, lambda: world.below.exists() and world.below.read_text(), "not begun")
        role._patience = replace(world.patience, start_s=0.5)
    else:
        world.patience = replace(world.patience, silent_s=0.5)
        role, _ = started(world)
        expected = r"did not answer /health for 0\.5 s \(engine\.silent_s\)"
    if how == "is silent":
        world.status.write_text("silent")
    if how == "hangs":
        world.says(State.HUNG)  # of its predecessor: so quickly none is met, and found to hang
        role.tick()
        expected = "hangs, says rollout-0"
        world.patience = replace(world.patience, silent_s=LIMIT_S)
        time.sleep(0.1)
        for _ in range(3):
            role.tick()
        world.says(State.HUNG)
    with pytest.raises(ServerEndedError, match=expected):
        until(role, lambda: False, "")
    role.close()
    assert not is_alive(int(world.below.read_text()))


def test_another_process_at_its_port_is_named(world: World) -> None:
    """It is not taken for ours, and what is told says what to change."""
    port = int(world.url.rpartition(":")[2])
    other = http.server.HTTPServer(("127.0.0.1", port), http.server.BaseHTTPRequestHandler)
    thread = threading.Thread(target=other.serve_forever, daemon=True)
    thread.start()
    world.patience = replace(world.patience, port_s=0.2)
    role = world.role()
    try:
        with pytest.raises(
            ConfigError, match=rf"{world.url}: another process listens .*engine\.port"
        ):
            until(role, lambda: False, "")
        assert role._process.child is None
    finally:
        other.shutdown()
        other.server_close()
        thread.join()


def test_servers_on_one_gpu_start_one_after_the_other(world: World) -> None:
    """Both would size their caches by the same free memory, and the second would die of it."""
    world.locks = [world.folder / "gpu-0.lock"]
    world.late.unlink()
    first = world.role()
    until(first, lambda: first._process.child, "not started")
    port = free_port()
    url, world.url = world.url, f"http://127.0.0.1:{port}"
    second = world.role(ordinal=1)
    for _ in range(3):
        second.tick()
    assert second._process.child is None
    assert str(world.locks[0]) in second._reporter._state[1]
    assert f"process {os.getpid()} " in second._reporter._state[1]
    world.late.touch()
    world.url = url
    until(first, lambda: first._ready_s is not None, "not ready")
    until(second, lambda: second._process.child, "its start never came")


def test_a_lock_for_each_gpu_of_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers of one GPU name the same file; where there is no GPU, nobody waits."""
    assert [] == list(start_locks("0")) or Path("/dev/nvidia0").exists()
    monkeypatch.setattr(Path, "glob", lambda *_: [Path(f"/dev/nvidia{n}") for n in range(2)])
    both, one = start_locks(None), start_locks("0")
    assert ["gpu-0.lock", "gpu-1.lock"] == [path.name[-10:] for path in both]
    assert list(one) == [both[0]]


def test_a_broker_that_is_away_ends_no_server(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its reports are lost meanwhile, and come again; one that was fenced does end."""
    monkeypatch.setattr(module, "BROKER_S", 0.0)
    role, pid = started(world)
    usual, errors = module.commit, [OutcomeUnknownError("no answer"), BrokerError("away")]

    def fails(*_: object) -> None:
        raise errors[0]

    monkeypatch.setattr(module, "commit", fails)
    until(role, lambda: role._producer is None, "no report was due")
    errors.pop(0)
    role._reporter.state("starting")
    role.tick()
    monkeypatch.setattr(module, "commit", usual)
    known = len(world.reports())
    until(role, lambda: len(world.reports()) > known, "it reports no more")
    assert is_alive(pid)
    world.stand.bus().producer("server.0").commit([])
    role._reporter.state("starting")
    with pytest.raises(FencedError):
        until(role, lambda: False, "")


def test_it_drains_once_its_workers_have(world: World) -> None:
    """`control drain` reaches all roles at once: what a worker samples, it finishes first."""
    role, pid = started(world)
    world.says(State.SERVING)
    until(role, lambda: not role.is_idle, "not heard")
    role.drain()
    for _ in range(5):
        role.tick()
    assert not role.done
    assert is_alive(pid)
    report = WorkerReport(
        worker="rollout-0", role="rollout", instance="one", state="stopped", detail="",
        policy_version=0, servers={world.url: "serving"},
    )  # fmt: skip
    world.pen.commit([outgoing(WORKER_EVENTS, report)])
    until(role, lambda: role.done, "it waits for nobody")


@pytest.mark.parametrize("end", [RELEASED, LOST])
def test_on_a_shared_device_it_has_memory_in_shifts_of_rollout_alone(
    world: World, end: str
) -> None:
    """It starts in one; after one it sleeps, as its worker says, or is ended; a lock says which."""
    role = world.role(is_shared=True)
    role.follow(Lease())
    role.tick()
    assert role._process.child is None
    role.follow(lease(GRANTED))
    until(role, lambda: role._ready_s is not None, "not ready")
    lock = MemoryLock(world.folder / "memory.lock")
    assert lock.hold()
    role.follow(lease(HELD))
    world.says(State.SERVING)
    role.tick()
    if end == RELEASED:
        world.says(State.ASLEEP)
    role.follow(lease(FREE, ended=end))
    until(role, lambda: not lock.hold(), "it keeps its memory")
    assert role.done == (end == LOST)
    if end == RELEASED:
        lock.release()
        role.follow(lease(GRANTED, shift=2))
        role.tick()
        assert MemoryLock(world.folder / "memory.lock").hold()
        assert role._process.child
        role.follow(lease(GRANTED, shift=3, instance="two"))
        role.tick()  # another process of its worker, which cannot know that it sleeps
        assert role.done


def test_a_shift_that_was_over_before_it_was_seen_ends_it(world: World) -> None:
    """Its worker woke it and died in between: it is not taken for one that sleeps."""
    role, _ = started(world, is_shared=True)
    world.says(State.ASLEEP)
    role.tick()
    role.follow(lease(FREE, ended=RELEASED))
    until(role, lambda: role._slept_in == 1, "not heard")
    role.follow(lease(FREE, shift=2, ended=LOST))
    role.tick()
    assert role.done


def test_a_server_ends_with_its_role_however_that_went(tmp_path: Path) -> None:
    """SIGKILL of the role, and whatever the server had started goes with it."""
    root = Path(__file__).parents[3]
    script = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from tests.processes.server.test_role import World\n"
        f"world = World(Path({str(tmp_path)!r}))\n"
        "role = world.role()\n"
        "while not world.below.exists() or not world.below.read_text():\n"
        "    role.tick()\n"
        "print(role._process.child.pid, flush=True)\n"
        "time.sleep(3600)\n"
    )
    role = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, cwd=root
    )
    assert role.stdout is not None
    with role:
        found = [int(role.stdout.readline()), int((tmp_path / "below").read_text())]
        assert all(map(is_alive, found))
        role.kill()
    until_s = time.monotonic() + LIMIT_S
    with suppress(ProcessLookupError):
        while any(map(is_alive, found)):
            assert time.monotonic() < until_s, "it outlived its role"
            time.sleep(0.02)
