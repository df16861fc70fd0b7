"""The batch script for Slurm, with stubs for Slurm and for roles: who starts where, who ends."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rlstreams.__main__ import parsed
from tests.hosts.slurm import SCRIPT, Slurm

NODES = ("n1", "n2", "n3")
DEADLINE_S = 30.0
# `up` serves a broker's password and ends with the content of `status`, once it is there. A worker
# that is drained says so a little later.
ROLES = """#!/bin/bash
line=$(printf '%q ' "$@")
echo "$line" >> "$STUB_FOLDER/calls"
trap 'sleep 0.2; echo "$STUB_NODE $1" >> "$STUB_FOLDER/drained"; exit 0' TERM
if [ "$1" = up ]; then
    mkdir -p "$DIR/$RUN/broker"
    echo secret > "$DIR/$RUN/broker/password"
fi
until [ "$1" = up ] && [ -s "$STUB_FOLDER/status" ]; do sleep 0.02; done
exit "$(cat "$STUB_FOLDER/status")"
"""


@pytest.fixture
def slurm(tmp_path: Path) -> Slurm:
    return Slurm(tmp_path, NODES, {"rlstreams": ROLES})


@pytest.fixture
def jobs() -> Iterator[list[subprocess.Popen[bytes]]]:
    started: list[subprocess.Popen[bytes]] = []
    yield started
    for job in started:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)
            job.wait()


def wait_for(reached: Callable[[], bool], what: str) -> None:
    until_s = time.monotonic() + DEADLINE_S
    while not reached():
        assert time.monotonic() < until_s, what
        time.sleep(0.02)


def calls(slurm: Slurm) -> list[list[str]]:
    return [shlex.split(line) for line in slurm.noted("calls")]


def test_the_first_node_has_up_and_the_others_join_it(
    slurm: Slurm, jobs: list[subprocess.Popen[bytes]]
) -> None:
    """Every command is one; `up` that ends takes its workers along, and its status is the job's."""
    job = slurm.batch("run.toml", "--trainer.steps=9", RUN="demo", PORT="4000")
    jobs.append(job)
    wait_for(lambda: len(calls(slurm)) == 3, "not all have started")
    assert slurm.noted("steps")[0].startswith("n1 rlstreams up ")
    assert sorted(line.split()[0] for line in slurm.noted("steps")) == list(NODES)
    up, *workers = calls(slurm)
    assert up[:3] == ["up", "run.toml", "--trainer.steps=9"]
    assert {"--resume", "--run.id=demo", "--broker.host=127.0.0.1", "--broker.port=4000"} <= {*up}
    parsed(up)
    for words in workers:
        assert words[:6] == ["worker", "rollout", "--join", "127.0.0.1:4000", "--run", "demo"]
        assert Path(words[words.index("--password-file") + 1]).read_text() == "secret\n"
        assert "--trainer.steps=9" not in words  # the claim has it
        parsed(words)
    (slurm.folder / "status").write_text("3")
    assert job.wait(DEADLINE_S) == 3
    assert sorted(slurm.noted("drained")) == ["n2 worker", "n3 worker"]
    assert not slurm.noted("requeued")


def test_a_signal_drains_all_and_the_job_is_queued_again(
    slurm: Slurm, jobs: list[subprocess.Popen[bytes]]
) -> None:
    """As at the end of its time, or at a preemption: it ends when the last of them has."""
    job = slurm.batch("run.toml", RUN="demo")
    jobs.append(job)
    wait_for(lambda: len(calls(slurm)) == 3, "not all have started")
    job.send_signal(signal.SIGTERM)  # the batch script alone: `--signal=B:TERM@600`
    assert job.wait(DEADLINE_S) == 0
    assert sorted(slurm.noted("drained")) == ["n1 up", "n2 worker", "n3 worker"]
    assert slurm.noted("requeued") == ["7"]
    assert "#SBATCH --signal=B:TERM@600" in SCRIPT.read_text("utf-8")


def test_a_second_job_joins_with_its_servers(
    slurm: Slurm, jobs: list[subprocess.Popen[bytes]]
) -> None:
    """On every node as many servers as named, each with a GPU, and one worker that uses them."""
    job = slurm.batch("--model.path=/srv/m", RUN="demo", JOIN="10.0.0.5:9092", SERVERS="2")
    jobs.append(job)
    wait_for(lambda: len(calls(slurm)) == 9, "not all have started")
    assert all(words[2:4] == ["--join", "10.0.0.5:9092"] for words in calls(slurm))
    assert all("--model.path=/srv/m" in words for words in calls(slurm))
    (secret,) = {w for words in calls(slurm) for w in words if w.startswith("--weights.secret=")}
    kept = Path(secret.removeprefix("--weights.secret=file:"))
    assert re.fullmatch("[0-9a-f]{64}", kept.read_text())
    assert kept.stat().st_mode & 0o077 == 0
    for node in NODES:
        of_node = [line.split(" ", 1)[1] for line in slurm.noted("steps") if line.startswith(node)]
        servers = sorted(line for line in of_node if "keep.sh server" in line)
        assert [f"--engine.port={8000 + n}" in line for n, line in enumerate(servers)] == [True] * 2
        (worker,) = [line for line in of_node if "keep.sh rollout" in line]
        assert worker.endswith('--engine.urls=["http://127.0.0.1:8000","http://127.0.0.1:8001"]')
    for words in calls(slurm):
        parsed(words)
    job.send_signal(signal.SIGTERM)
    assert job.wait(DEADLINE_S) == 0
    assert len(slurm.noted("drained")) == 9
