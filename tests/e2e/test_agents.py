"""A run whose samples are agents in processes of their own: whoever is killed, no call is lost."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from rlstreams import open_run
from rlstreams.schemas.events import (
    CallCommitted,
    CallReplayed,
    DeadLetter,
    SessionClosed,
    SessionOpened,
    Trajectory,
)
from tests.e2e.command import ROOT, UP_S, Workspace
from tests.e2e.test_stalls import process_of

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="looks for processes in /proc"
)
RUNNER = ROOT / "infra/examples/agent/remote.py"
# Any program that speaks to an OpenAI server; what it hears it writes down at once.
AGENT = """
import json, os, re, sys, time, urllib.request

task = json.load(open(os.environ["RLSTREAMS_TASK"]))
messages = []
for number in range(3):
    messages.append({"role": "user", "content": task["prompt"]})
    body = json.dumps({"model": "policy", "messages": messages}).encode()
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions", data=body,
        headers={"authorization": "Bearer " + os.environ["OPENAI_API_KEY"],
                 "content-type": "application/json"})
    answer = json.load(urllib.request.urlopen(request, timeout=300))
    said = answer["choices"][0]["message"]["content"]
    line = json.dumps([task["session"], number, answer["id"], said, os.getpid()]) + "\\n"
    fd = os.open(sys.argv[1], os.O_APPEND | os.O_CREAT | os.O_WRONLY)
    os.write(fd, line.encode())
    time.sleep(0.05)
    messages.append({"role": "assistant", "content": said})
right = bool(re.findall(r"[0-9]+", said)) and re.findall(r"[0-9]+", said)[-1] == task["answer"]
body = json.dumps({"reward": float(right), "parts": {"right": float(right)}}).encode()
urllib.request.urlopen(urllib.request.Request(
    os.environ["OPENAI_BASE_URL"] + "/outcome", data=body,
    headers={"authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}), timeout=300)
"""
CONFIG = """
extends = "infra/examples/demo.toml"

[[agent]]
name = "counter"
command = ["python", "agent.py", "{heard}"]

[reward]
verifier = "agent"

[[agent]]
name = "away"
remote = true
lease_s = 5.0

[rollout]
slots = 8

[prompts]
group_size = 4
evaluate_every = 0
evaluate_rows = 2

[demo]
kills = []

[trainer]
steps = 3
groups_per_step = 2
"""


def test_agents_and_their_worker_are_killed_and_no_call_is_lost(tmp_path: Path) -> None:
    """The worker three times, two agents, while others run elsewhere: each call that an agent heard
    is in the log once, and was heard word for word alike; the killed agents are no rewards of 0;
    the audit is clean."""
    workspace = Workspace(tmp_path)
    heard = tmp_path / "heard.jsonl"
    heard.touch()
    (tmp_path / "agent.py").write_text(AGENT)
    (tmp_path / "run.toml").write_text(CONFIG.format(heard=heard))
    run = tmp_path / "runs/demo"
    killed_agents: list[str] = []
    runner = _runner_of(run)
    try:
        started = workspace.start_up(f"--run.dir={run}", config="run.toml")

        def until(num_heard: int) -> list[list[object]]:
            _until(
                lambda: len(_lines(heard)) >= num_heard or started.process.poll() is not None,
                lambda: f"heard {len(_lines(heard))}:\n{started.output}",
            )
            return _lines(heard)

        for num in (6, 22, 38):
            until(num)
            os.kill(process_of(workspace, "rollout-0"), signal.SIGKILL)
            session = _kill_one_agent(until(num + 6))
            killed_agents += [session] if session else []
        assert 0 == started.ended_within(UP_S), started.output
        with open_run(run) as log:
            calls, replays, opened, closed, letters, trajectories = (
                [record.event for record in log.read(kind)]
                for kind in (CallCommitted, CallReplayed, SessionOpened, SessionClosed, DeadLetter,
                             Trajectory)
            )  # fmt: skip
    finally:
        runner.kill()
        runner.wait()
        workspace.close()
    assert "lost 0, trained twice 0" in started.output
    by_id = Counter(call.call_id for call in calls)
    assert set(by_id.values()) == {1}
    lines = _lines(heard)
    assert {_call_of(line) for line in lines} <= set(by_id)
    said = {(line[0], line[1]): set() for line in lines}
    for line in lines:
        said[line[0], line[1]].add((line[2], line[3]))
    assert {len(answers) for answers in said.values()} == {1}
    assert max(one.start for one in opened) >= 1
    assert replays, "nobody was answered from the log"
    assert len({one.session_id for one in closed}) == len(closed)
    kinds = Counter(one.kind for one in closed)
    assert kinds["ended"] == len(trajectories)
    assert kinds["agent"] == len([one for one in letters if one.reason == "agent"])
    assert kinds["agent"] <= len(killed_agents)
    away = {one.session_id for one in opened if one.agent == "away"}
    assert {one.kind for one in closed if one.session_id in away} == {"ended"}
    whole = ("prompt", "policy", *["environment", "policy"] * 2)
    assert whole in {tuple(s.author for s in one.segments) for one in trajectories}


def _runner_of(run: Path) -> subprocess.Popen[bytes]:
    """The example, on its way: it waits for the file of the rollout worker."""
    return subprocess.Popen(
        [sys.executable, RUNNER, "4", run / "agents/rollout-0/away/runner.json"],
        env={**os.environ, "NO_PROXY": "127.0.0.1"},
        stderr=subprocess.DEVNULL,
    )


def _call_of(line: list[object]) -> str:
    return str(line[2]).rpartition("-")[2]


def _lines(heard: Path) -> list[list[object]]:
    text = heard.read_text()
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def _kill_one_agent(lines: list[list[object]]) -> str:
    """The session of an agent that is between two calls; "": none was there."""
    for session, number, _, _, pid in reversed(lines):
        if number == 2:
            continue
        try:
            os.kill(int(str(pid)), signal.SIGKILL)
        except ProcessLookupError:
            continue
        return str(session)
    return ""


def _until(reached: Callable[[], bool], what: Callable[[], str]) -> None:
    until_s = time.monotonic() + UP_S
    while not reached():
        assert time.monotonic() < until_s, what()
        time.sleep(0.02)
