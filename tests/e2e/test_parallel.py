"""Layouts in whole runs: roles of two ranks, each killed once, and log-probs without a scorer."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from rlstreams.streams.broker.ports import free_ports
from tests.containers import wait_until
from tests.e2e.command import CONFIG, UP_S, Started, Workspace

END_S = 10.0  # of what dies with its parent
pytestmark = pytest.mark.slow
BRIEF = ("--steps=8", "--demo.kills=[]", "--prompts.evaluate_every=0")


@pytest.fixture
def workspace(tmp_path: Path) -> Iterator[Workspace]:
    made = Workspace(tmp_path)
    yield made
    made.close()


def follower(workspace: Workspace, started: Started, before: int = 0) -> tuple[int, int]:
    """The process of rank 1 and its trainer's, once there is another one than `before`."""
    deadline_s = time.monotonic() + UP_S
    while time.monotonic() < deadline_s:
        assert started.process.poll() is None, started.output
        for process in workspace.processes():
            try:
                words = Path(f"/proc/{process}/cmdline").read_bytes()
                # Its reaper, which has its words as well, stands between the two.
                is_rank = b"compute.follower" in words and b"reaper.py" not in words
                if is_rank and process != before:
                    return process, parent(parent(process))
            except (FileNotFoundError, ProcessLookupError):
                continue
        time.sleep(0.05)
    raise AssertionError(f"no follower:\n{started.output}")


def parent(process: int) -> int:
    status = Path(f"/proc/{process}/status").read_text("utf-8")
    return int(re.findall(r"PPid:\s+(\d+)", status)[0])


PIPELINE = ("--trainer.backend=megatron", "--trainer.layout.pp=2", "--trainer.checkpoint_every=4")
needs_megatron = pytest.mark.skipif(
    find_spec("megatron") is None, reason="megatron-core needs Python 3.12"
)


@pytest.mark.parametrize(
    ("role", "owner", "asked"),
    [
        ("trainer", "trainer", ("--trainer.ranks=2",)),
        pytest.param(
            "trainer",
            "trainer",
            ("--trainer.ranks=2", *PIPELINE),
            marks=needs_megatron,
        ),
        pytest.param(
            "trainer",
            "trainer",
            ("--trainer.ranks=2", "--trainer.layout.cp=2", "--trainer.routing_replay=true"),
        ),
        pytest.param("logprob", "scorer", ("--logprob.ranks=2",)),
    ],
)
def test_a_role_of_two_ranks_survives_the_death_of_each(
    workspace: Workspace, role: str, owner: str, asked: tuple[str, ...]
) -> None:
    """Redone steps have the recorded hashes, the audit is clean, no process is left."""
    started = workspace.start_up(*BRIEF, *asked)
    started.wait_for_step(3)
    rank_1, _ = follower(workspace, started)
    os.kill(rank_1, signal.SIGKILL)
    started.wait_for_step(6)
    _, rank_0 = follower(workspace, started, before=rank_1)
    os.kill(rank_0, signal.SIGKILL)
    assert 0 == started.ended_within(UP_S), started.output
    log = (workspace.folder / f"runs/demo/logs/{role}-0.log").read_text("utf-8")
    assert f"rank 1 of the {owner} (process {rank_1}) was ended by SIGKILL" in log
    assert role == "logprob" or all_equal(started.output)
    audit = workspace.run("rlstreams", "audit", "runs/demo")
    assert 0 == audit.returncode, audit.stdout
    assert {} == {p: n for p, n in workspace.processes().items() if "python" in n}


def test_a_trainer_of_two_hosts_survives_the_death_of_each_process(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the rank on the other host, of what started it there, and of rank 0, which it outlives."""
    monkeypatch.setenv("RANKS_SECRET", "of both hosts")
    (port,) = free_ports(1)
    hosts = f'--trainer.hosts=["127.0.0.2:{port}"]'
    asked = ("--trainer.ranks=2", hosts, "--weights.secret=env:RANKS_SECRET")
    serve = ("rlstreams", "worker", "ranks", CONFIG, *asked)
    other_host = workspace.start(*serve)
    started = workspace.start_up(*BRIEF, '--demo.kills=[{role = "trainer", at = 0.75}]', *asked)
    started.wait_for_step(2)
    rank_1, serving = follower(workspace, started)
    assert serving == other_host.process.pid
    os.kill(rank_1, signal.SIGKILL)
    started.wait_for_step(4)
    _, serving = follower(workspace, started, before=rank_1)
    assert serving == other_host.process.pid
    os.kill(serving, signal.SIGKILL)
    other_host.ended_within(UP_S)
    other_host = workspace.start(*serve)
    assert 0 == started.ended_within(UP_S), started.output
    told = f"rank 1 of the trainer (on 127.0.0.2:{port}) closed its link"
    assert 2 == started.output.count(told), started.output
    assert "1 process killed" in started.output
    assert "lost 0, trained twice 0" in started.output
    assert all_equal(started.output)
    assert "rank_ended" in other_host.output
    other_host.signal(signal.SIGTERM)
    assert 0 == other_host.ended_within(UP_S), other_host.output
    wait_until(lambda: "python" not in workspace.processes().values(), END_S, "the end of all")


@pytest.mark.parametrize(
    ("place", "asked"),
    [
        ("trainer", ("--trainer.loss.proximal=step_start",)),
        ("off", ("--trainer.loss.proximal=behavior", "--trainer.loss.correction=none")),
    ],
)
def test_a_run_without_a_scorer_survives_the_death_of_its_trainer(
    workspace: Workspace, place: str, asked: tuple[str, ...]
) -> None:
    """Log-probs that the trainer computed itself are computed again, to the same hashes."""
    kill = '--demo.kills=[{role = "trainer", at = 0.6}]'
    started = workspace.start_up(*BRIEF, kill, f"--logprob.place={place}", *asked)
    assert 0 == started.ended_within(UP_S), started.output
    assert "1 process killed" in started.output
    assert "lost 0, trained twice 0" in started.output
    assert all_equal(started.output)


def all_equal(output: str) -> bool:
    """Steps were done again, and all have the recorded hashes."""
    redone = re.findall(r"(\d+) of (\d+) weight hashes equal", output)
    return bool(redone) and all(equal == of for equal, of in redone)
