"""Roles by hand: the lines of infra/docs/by-hand.md, as written, each role in its own process."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rlstreams import open_run
from rlstreams.schemas.events import ControlState, WorkerReport
from rlstreams.streams.broker.ports import free_ports
from rlstreams.streams.workers import JOINED_FROM
from rlstreams.workers.bootstrap.parts import place_of
from rlstreams.workers.config.load import load
from tests.e2e.command import ROOT
from tests.readme_blocks import blocks

DEADLINE_S = 240
ROLES = ("prompts", "rollout", "logprob", "trainer")
# Without a scorer there is no step: the run cannot be over before the joiner is there.
STARTED = ("prompts", "rollout", "trainer", "joined", "logprob")


@pytest.mark.slow
def test_ten_lines_start_a_run_in_four_terminals(tmp_path: Path) -> None:
    """To its end; each role says what it does, the trainer how each step went. A further rollout
    worker joins from a folder without files, and is not counted by who scales."""
    (block,) = blocks((ROOT / "infra/docs/by-hand.md").read_text("utf-8"))
    port = str(free_ports(1)[0])
    text = block.text.replace("9092", port)
    lines = [line.partition("  #")[0].rstrip() for line in text.splitlines()]
    assert 10 == len(lines)
    workers = [line for line in lines if " worker " in line]
    assert [*ROLES] == [line.split()[2] for line in workers]
    before, audit = lines[: lines.index(workers[0])], lines[-1]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = {**os.environ, "PATH": path}
    started: dict[str, subprocess.Popen[str]] = {}
    folder = tmp_path / "sums"

    def said(line: str, cwd: Path) -> str:
        done = subprocess.run(line, shell=True, cwd=cwd, env=env, timeout=DEADLINE_S, check=True,
                              capture_output=True, text=True)  # fmt: skip
        return done.stdout + done.stderr

    said(before[0], tmp_path)
    try:
        for line in before[2:]:
            said(line, folder)
        config = (folder / "run.toml").read_text("utf-8")
        (folder / "run.toml").write_text(re.sub("steps = 60", "steps = 3", config), "utf-8")
        lines_of = dict(zip(ROLES, workers, strict=True))
        lines_of["joined"] = f"rlstreams worker rollout --join 127.0.0.1:{port} --run sums"
        (tmp_path / "elsewhere").mkdir()
        for role in STARTED:
            cwd = tmp_path / "elsewhere" if role == "joined" else folder
            with (folder / f"{role}.log").open("w") as log:
                words = f"exec {lines_of[role]}"
                started[role] = subprocess.Popen(words, shell=True, cwd=cwd, env=env, text=True,
                                                 stdout=log, stderr=log)  # fmt: skip
            if role in ("trainer", "joined"):  # who joins waits a minute for the claim, no longer
                await_state(folder / f"{role}.log", started[role])
            if role == "joined":
                scaled = said("rlstreams control scale run.toml rollout=3 --within 0", folder)
                assert "run sums: rollout 1\n" in scaled
        for role in ("trainer", "joined"):
            text = (folder / f"{role}.log").read_text("utf-8")
            assert 0 == started[role].wait(DEADLINE_S), text
        check_joined(folder)
        assert "ok: every sample accounted for" in said(audit, folder)
    finally:
        for process in started.values():
            process.terminate()
        for process in started.values():
            process.wait(DEADLINE_S)
        said("rlstreams broker stop broker", folder)
    logs = {role: logged(folder / f"{role}.log") for role in ROLES}
    for role, found in logs.items():
        assert ("starting", "ended") == (found[0]["event"], found[-1]["event"]), role
        assert any(line["event"] == "state" and line["state"] for line in found), role
    steps = [line for line in logs["trainer"] if line["event"] == "step_completed"]
    assert [1, 2, 3] == [line["step"] for line in steps]
    assert all(0 <= line["reward"] <= 1 for line in steps)
    assert "done" == logs["trainer"][-1]["reason"]


def check_joined(folder: Path) -> None:
    """What was asked for is in the log, and the joiner has its number."""
    with open_run(place_of(load([folder / "run.toml"], []))) as log:
        wanted = [record.event for record in log.read(ControlState)][-1]
        came = {record.event.worker for record in log.read(WorkerReport)}
    assert {"rollout": 3} == wanted.workers
    assert {"rollout-0", f"rollout-{JOINED_FROM}"} <= came


def await_state(path: Path, process: subprocess.Popen[str]) -> None:
    """Until it has said what it does."""
    until_s = time.monotonic() + DEADLINE_S
    while not any(line["event"] == "state" for line in logged(path)):
        assert process.poll() is None, path.read_text("utf-8")
        assert time.monotonic() < until_s, path.read_text("utf-8")
        time.sleep(0.05)


def logged(path: Path) -> list[dict[str, object]]:
    """The lines of a worker's log; what libraries write there is no JSON."""
    text = path.read_text("utf-8")
    whole = text[: text.rfind("\n") + 1].splitlines()
    return [json.loads(line) for line in whole if line[:1] == "{"]
