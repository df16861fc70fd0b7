"""A whole run with branches: what an agent sampled beside its main chain is learnt from, once."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path
from statistics import fmean

import pytest

from rlstreams import open_run
from rlstreams.schemas.events import (
    TRAIN,
    CallCommitted,
    CallReplayed,
    Segment,
    SessionOpened,
    StepCompleted,
    Trajectory,
)
from tests.e2e.command import UP_S, Workspace

pytestmark = pytest.mark.slow
STEPS = 14
# A title that is no work, a sub-agent, and a history that is written anew behind two turns.
AGENT = """
import re

SUMS = re.compile(r"[0-9]+")


async def solve(task, client):
    problem, right = task["prompt"], []
    told = await ask(client, [{"role": "user", "content": "3+4="}], "false")
    for num_turns in (2, 1, 1):
        messages = []
        for _ in range(num_turns):
            messages.append({"role": "user", "content": problem})
            said = await ask(client, messages, "true")
            messages.append({"role": "assistant", "content": said})
            numbers = SUMS.findall(said)
            right.append(bool(numbers) and numbers[-1] == task["answer"])
        problem = task["prompt"]
    return sum(right) / len(right)


async def ask(client, messages, is_trained):
    answer = await client.chat.completions.create(
        model="policy", messages=messages, extra_headers={"x-rlstreams-is-trained": is_trained})
    return answer.choices[0].message.content or ""
"""
CONFIG = f"""
extends = "infra/examples/demo.toml"

[[agent]]
name = "brancher"
python = "agent.py:solve"
branches = true

[reward]
verifier = "agent"

[rollout]
slots = 64

[prompts]
evaluate_every = 0
evaluate_rows = 2

[trainer]
steps = {STEPS}
groups_per_step = 8

[demo]
kills = [{{ role = "rollout", at = 0.4 }}]
"""


def words(segments: Iterable[Segment]) -> Counter[tuple[bytes, bytes]]:
    """Tokens and log-probs of what the policy said, by how often."""
    return Counter(
        (bytes(s.token_ids.data), bytes(s.behavior_logprobs.data))
        for s in segments
        if s.author == "policy" and s.behavior_logprobs is not None and len(s.token_ids)
    )


def test_a_run_learns_from_branches_each_token_once(tmp_path: Path) -> None:
    """Its worker is killed on the way. Each sample that was trained has the tokens of all its
    session's calls but the title's, each once; no sample was trained twice; the reward rises; the
    audit is clean, and a step is done again bit for bit."""
    workspace, run = Workspace(tmp_path), tmp_path / "runs/demo"
    (tmp_path / "agent.py").write_text(AGENT)
    (tmp_path / "run.toml").write_text(CONFIG)
    try:
        started = workspace.start_up(f"--run.dir={run}", config="run.toml")
        assert started.ended_within(UP_S) == 0, started.output
        audit = workspace.run("rlstreams", "audit", str(run), timeout_s=UP_S)
        again = workspace.run("rlstreams", "replay", "step", "9", str(run), timeout_s=UP_S)
        with open_run(run) as log:
            calls, replays, opened, steps, trajectories = (
                [record.event for record in log.read(kind)]
                for kind in (CallCommitted, CallReplayed, SessionOpened, StepCompleted, Trajectory)
            )
    finally:
        workspace.close()
    assert audit.returncode == 0, audit.stdout
    assert "every one is equal, bit for bit" in again.stdout, again.stdout
    assert (len(steps), replays != []) == (STEPS, True), started.output
    sessions = {f"{t.group_id}/{t.sample}": t for t in trajectories if t.purpose == TRAIN}
    of_session: dict[str, dict[str, CallCommitted]] = defaultdict(dict)
    for call in calls:
        of_session[call.session_id].setdefault(call.call_id, call)
    newest = {one.session_id: one.start for one in sorted(opened, key=lambda one: one.start)}
    answered = {(one.session_id, one.call_id) for one in replays
                if one.start == newest[one.session_id]}  # fmt: skip
    num_learnt = dict[str, int]()
    for name, trajectory in sessions.items():
        heard = [c for c in of_session[name].values()
                 if c.start == newest[name] or (name, c.call_id) in answered]  # fmt: skip
        assert len(heard) == 5, name
        assert sorted(c.is_trained for c in heard) == [False, *[True] * 4]
        wanted = [s for c in heard if c.is_trained for s in c.segments]
        assert words(trajectory.segments) == words(wanted), name
        num_learnt[name] = sum(len(s.token_ids) for s in wanted)
    trained = [f"{ref.group_id}/{ref.sample}" for step in steps for ref in step.samples]
    assert len(trained) == len(set(trained)) == STEPS * 64
    for step in steps:
        names = [f"{ref.group_id}/{ref.sample}" for ref in step.samples]
        masked = sum(
            len(sessions[f"{one.group_id}/{one.sample}"].segments[one.segment].token_ids)
            for one in step.masked
        )
        learnt = sum(step.staleness.values())
        assert learnt + masked == sum(num_learnt[name] for name in names), step.step
        assert (set(step.rows), masked < learnt / 4) == ({3}, True), step.step
    rewards = [fmean(sessions[f"{r.group_id}/{r.sample}"].reward for r in s.samples) for s in steps]
    assert fmean(rewards[-4:]) > fmean(rewards[:4]) + 0.05, rewards
