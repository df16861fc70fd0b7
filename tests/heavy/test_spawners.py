"""Real worker processes, started in both ways: their imports alone take seconds."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from multiprocessing import forkserver
from pathlib import Path

from rlstreams.streams.log.text import tail
from rlstreams.streams.process.fork_server import UNLEARNT, Forked
from rlstreams.up.supervisor.spawner import ForkSpawner, PlainSpawner, WorkerSpec
from rlstreams.workers.config.load import resolved_json
from rlstreams.workers.config.run import RunConfig

ROOT = Path(__file__).parents[2]


def test_both_ways_to_start_a_worker_run_the_same_command(tmp_path: Path) -> None:
    """A configuration that cannot be used is told in the log, and ends with status 78."""
    config = tmp_path / "config.json"
    config.write_text(resolved_json(RunConfig()).replace('"seed"', '"sead"'))
    context = multiprocessing.get_context("forkserver")
    for number, spawner in enumerate(
        (PlainSpawner(), ForkSpawner(context, "rlstreams.workers.loop.runtime"))
    ):
        spec = WorkerSpec(
            role="logprob", ordinal=number, config=config, log=tmp_path / f"{number}.log",
            instance="i",
        )  # fmt: skip
        child = spawner.spawn(spec)
        assert child.wait(20)
        assert child.poll() == 78
        assert "sead" in tail(spec.log, 1)[-1]


BEGUN_WITHOUT = """
import multiprocessing, sys, time
from pathlib import Path
from rlstreams.up.supervisor.spawner import ForkSpawner, WorkerSpec
context = multiprocessing.get_context("forkserver")
context.Process(target=time.sleep, args=(0,)).start()
spawner = ForkSpawner(context, "rlstreams.workers.loop.runtime")
config, log = map(Path, sys.argv[1:])
child = spawner.spawn(WorkerSpec(role="logprob", ordinal=0, config=config, log=log, instance="i"))
child.wait(60)
print(child.poll())
"""


def test_a_fork_server_that_had_begun_before_serves_too(tmp_path: Path) -> None:
    """Its children import what a fork server of ours has imported before."""
    config = tmp_path / "config.json"
    config.write_text(resolved_json(RunConfig()).replace('"seed"', '"sead"'))
    words = [sys.executable, "-c", BEGUN_WITHOUT, str(config), str(tmp_path / "log")]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=90, check=False)
    assert (done.stdout, done.returncode) == ("78\n", 0), done.stderr


# A supervisor in little, on its terminal: it is told of signals and goes on.
SUPERVISOR = """
import multiprocessing, os, signal, sys, time
from multiprocessing import forkserver
from rlstreams.streams.process.fork_server import Forked
from rlstreams.up.supervisor.spawner import ForkSpawner
heard = []
for number in (signal.SIGINT, signal.SIGHUP):
    signal.signal(number, lambda number, frame: heard.append(number))
context = multiprocessing.get_context("forkserver")
ForkSpawner(context, "tests.heavy.slow_to_import")
server = forkserver._forkserver._forkserver_pid
process = context.Process(target=time.sleep, args=(3600,))
process.start()
role = Forked(process)
os.killpg(0, signal.SIGINT)
os.killpg(0, signal.SIGHUP)
time.sleep(0.5)
sessions = [os.getsid(pid) == server for pid in (server, role.pid)]
print(sorted(heard), sessions, server == forkserver._forkserver._forkserver_pid, role.poll())
role._process.kill()
"""


def test_what_a_terminal_sends_reaches_neither_the_fork_server_nor_what_it_forks() -> None:
    """Ctrl-C and a hang-up: its children's exit statuses go through it."""
    done = subprocess.run(
        [sys.executable, "-c", SUPERVISOR], cwd=ROOT, start_new_session=True, capture_output=True,
        text=True, timeout=120, check=False,
    )  # fmt: skip
    assert (done.stdout, done.stderr) == ("[1, 2] [True, True] True None\n", "")


def test_a_child_of_a_server_that_began_cuda_starts_as_a_process_of_its_own(
    tmp_path: Path,
) -> None:
    """It could use no GPU. Its pipe, log and exit status are those of any other child."""
    config = tmp_path / "config.json"
    config.write_text(resolved_json(RunConfig()).replace('"seed"', '"sead"'))
    done = subprocess.run(
        [sys.executable, "-c", BEGAN_CUDA, str(config), str(tmp_path / "log")], cwd=ROOT,
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert (done.stdout, done.stderr) == ("True 78\n", "")
    assert "sead" in tail(tmp_path / "log", 1)[-1]


BEGAN_CUDA = """
import multiprocessing, sys
from pathlib import Path
from rlstreams.up.supervisor.spawner import ForkSpawner, WorkerSpec
spawner = ForkSpawner(multiprocessing.get_context("forkserver"), "tests.heavy.began_cuda")
config, log = map(Path, sys.argv[1:])
child = spawner.spawn(
    WorkerSpec(role="logprob", ordinal=0, config=config, log=log, instance="i")
)
print(child.wait(60), child.poll())
"""


def test_a_worker_lives_on_without_the_fork_server() -> None:
    """Nobody learns its exit status any more, but it has not ended before it has."""
    context = multiprocessing.get_context("forkserver")
    process = context.Process(target=time.sleep, args=(3600,))
    process.start()
    worker = Forked(process)
    os.kill(forkserver._forkserver._forkserver_pid, signal.SIGKILL)  # type: ignore[attr-defined]
    process.join(20)
    assert (process.exitcode, worker.poll()) == (UNLEARNT, None)
    os.kill(worker.pid, signal.SIGKILL)
    deadline_s = time.monotonic() + 20
    while worker.poll() is None and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert worker.poll() == UNLEARNT
