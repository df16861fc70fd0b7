"""Agents that run elsewhere work on while what they call is killed at random, and they as well."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import pytest

from rlstreams import open_run
from rlstreams.check.trial.sample import loaded
from rlstreams.schemas.events import CallCommitted, CallReplayed, SessionClosed, SessionOpened
from rlstreams.streams.sessions.session import Session, sampled_tokens
from rlstreams.workers.config.load import load
from rlstreams.workers.config.run import RunConfig
from rlstreams.workers.engines.base import SampleRequest
from rlstreams.workers.engines.turn import whole_turn
from rlstreams.workers.rollout.sampling import sampling_of
from tests.e2e.command import UP_S, Started, Workspace
from tests.e2e.test_stalls import process_of

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks for processes in /proc"),
]
SEED = 7
STRIKES = ("rollout", "agents", "broker", "rollout", "agents")
PAUSE_S = (0.5, 2.5)  # between two strikes
# Runners and clients from outside in one process: the standard library alone, and a patient one. A
# runner begins anew when it is killed; a client keeps its key, and sends what failed again.
AGENTS = """
import json, os, sys, threading, time, urllib.error, urllib.request

folder, heard, num = sys.argv[1], sys.argv[2], int(sys.argv[3])


def post(url, key, body, retries):
    for tried in range(retries + 1):
        request = urllib.request.Request(url, json.dumps(body).encode(), {
            "authorization": "Bearer " + key, "x-stainless-retry-count": str(tried)})
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                text = answer.read()
                return json.loads(text) if text else None
        except urllib.error.HTTPError as err:
            if err.code not in (429, 503):
                return None
        except OSError:
            pass
        time.sleep(0.2)


def work(file, query, retries):
    told = json.load(open(file))
    given = post(told["url"] + "?wait_s=5" + query, told["key"], {}, 0)
    if given is None:
        return time.sleep(0.2)
    messages, url, key = [], given["base_url"], given["api_key"]
    for number in range(3):
        text = given["task"]["prompt"] if "task" in given else "3+%d=" % number
        messages.append({"role": "user", "content": text})
        answer = post(url + "/chat/completions", key, {"messages": messages}, retries)
        if answer is None:
            return
        said = answer["choices"][0]["message"]["content"]
        line = json.dumps([given["session"], answer["id"].rpartition("-")[2], said]) + "\\n"
        fd = os.open(heard, os.O_APPEND | os.O_CREAT | os.O_WRONLY)
        os.write(fd, line.encode())
        os.close(fd)
        messages.append({"role": "assistant", "content": said})
        time.sleep(0.1)
    post(url + "/outcome", key, {"reward": len(said) % 3}, retries)
    post(url + "/close", key, {"kind": "ended"}, retries)


def run(agent, name, query, retries):
    while True:
        try:
            work(f"{folder}/{agent}/{name}", query, retries)
        except (OSError, ValueError):
            time.sleep(0.2)


for number in range(num):
    threading.Thread(target=run, args=("away", "runner.json", "", 2)).start()
    if sys.argv[4] == "clients":
        threading.Thread(target=run, args=("own", "clients.json", "&group=g", 600)).start()
"""
CONFIG = """
extends = "infra/examples/demo.toml"

[[agent]]
name = "away"
remote = true
lease_s = 2.0
starts = 20

[[agent]]
name = "own"
outside = true
lease_s = 8.0

[reward]
verifier = "agent"

[rollout]
slots = 8

[prompts]
group_size = 4
evaluate_every = 0
evaluate_rows = 1

[demo]
kills = []

[trainer]
steps = 1
groups_per_step = 5
min_group_samples = 2
"""


def test_no_call_is_lost_or_made_twice_and_each_is_as_if_nobody_had_been_killed(
    tmp_path: Path,
) -> None:
    """The rollout worker with its gateway, the broker and the runners, at random times."""
    workspace = Workspace(tmp_path)
    heard, run = tmp_path / "heard.jsonl", tmp_path / "runs/demo"
    (tmp_path / "agents.py").write_text(AGENTS)
    (tmp_path / "run.toml").write_text(CONFIG)
    folder = str(run / "agents/rollout-0")
    clients = _agents(tmp_path, folder, heard, "clients")
    runners = _agents(tmp_path, folder, heard, "runners")
    draw, struck = random.Random(SEED), Counter[str]()
    try:
        started = workspace.start_up(f"--run.dir={run}", config="run.toml")
        _until_heard(heard, started, 4)
        for victim in STRIKES:
            time.sleep(draw.uniform(*PAUSE_S))
            if started.process.poll() is not None:
                break
            if victim == "agents":
                runners.kill()
                runners.wait()
                runners = _agents(tmp_path, folder, heard, "runners")
            else:
                _kill(workspace, victim)
            struck[victim] += 1
            _until_heard(heard, started, len(_lines(heard)) + 2)
        assert 0 == started.ended_within(UP_S), started.output
        audit = workspace.run("rlstreams", "audit", str(run))
        assert 0 == audit.returncode, audit.stdout
        kinds = (SessionOpened, CallCommitted, CallReplayed, SessionClosed)
        with open_run(run) as log:
            events = [record.event for kind in kinds for record in log.read(kind)]
            sessions = log.sessions()
    finally:
        for one in (clients, runners):
            one.kill()
            one.wait()
        workspace.close()
    assert struck.keys() == set(STRIKES), struck
    assert "lost 0, trained twice 0" in started.output
    calls = [one for one in events if isinstance(one, CallCommitted)]
    assert {1} == set(Counter(call.call_id for call in calls).values())
    lines = _lines(heard)
    assert {name for _, name, _ in lines} <= {call.call_id for call in calls}
    assert len({name for _, name, _ in lines}) == len({(name, said) for _, name, said in lines})
    assert any(isinstance(one, CallReplayed) for one in events)
    of_clients = {one.session_id for one in events if getattr(one, "client_group", "")}
    closed = {one.session_id: one.kind for one in events if isinstance(one, SessionClosed)}
    worked = of_clients & {session for session, _, _ in lines}
    assert worked
    # A kill may swallow the answer that gives a session away: of that one nobody hears more. One
    # that swallows a close that was answered leaves a client that is silent behind its reward.
    assert {"ended"} == {closed[name] for name in worked}, closed
    config = load([tmp_path / "run.toml"], [f"run.dir={run}"])
    _check_tokens(config, sessions)


def _agents(folder: Path, at: str, heard: Path, kind: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, folder / "agents.py", at, heard, "2", kind],
        env={**os.environ, "NO_PROXY": "127.0.0.1"},
    )


def _kill(workspace: Workspace, victim: str) -> None:
    if victim == "broker":
        found = [pid for pid, program in workspace.processes().items() if program == "java"]
        os.kill(found[0], signal.SIGKILL)
    else:
        os.kill(process_of(workspace, f"{victim}-0"), signal.SIGKILL)


def _lines(heard: Path) -> list[tuple[str, str, str]]:
    text = heard.read_text() if heard.exists() else ""
    whole = text[: text.rfind("\n") + 1].splitlines()
    return [(session, name, said) for session, name, said in map(json.loads, whole)]


def _until_heard(heard: Path, started: Started, num: int) -> None:
    until_s = time.monotonic() + UP_S
    while len(_lines(heard)) < num and started.process.poll() is None:
        assert time.monotonic() < until_s, started.output
        time.sleep(0.02)


def _check_tokens(config: RunConfig, sessions: Iterable[Session]) -> None:
    """Each call that was sampled under version 0 says what its identity alone makes it say."""
    prompted = [
        (session, name)
        for session in sessions
        if session.opened is not None and session.opened.purpose == "train"
        for name in session.nodes
    ]
    assert len(prompted) >= 5 * 2 * 3

    async def check() -> None:
        channel, engine = loaded(config)
        await engine.start()
        await engine.pull(channel.published, channel)
        for session, name in prompted:
            await _check_call(engine, config, session, name)
        await engine.close()

    asyncio.run(check())


async def _check_call(engine: object, config: RunConfig, session: Session, name: str) -> None:
    call, ids = session.nodes[name].call, session.tokens_of(name)
    num = sampled_tokens(call)
    assert session.opened is not None
    request = SampleRequest(
        sample_id=f"{session.session_id}/{name}/{call.attempt}",
        group_id=call.group_id,
        token_ids=ids[: len(ids) - num],
        prompt_tokens=len(ids) - num,
        sampling=sampling_of(config.rollout),
        seed=session.opened.seed,
    )
    segments = await whole_turn(engine, request)  # type: ignore[arg-type]
    said = [token for segment in segments for token in segment.token_ids]
    assert {segment.policy_version for segment in call.segments} == {0}
    assert ids[len(ids) - num :].tolist() == said
