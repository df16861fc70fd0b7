"""Agents work on while what they call is killed at random, and they as well: the script that
measures it, in small."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.bench.agent_kills import CALM
from tests.e2e.command import UP_S, Workspace

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks for processes in /proc"),
]
SEED, KILLS = 7, 8
VICTIMS = {"agents", "broker", "logprob", "prompts", "rollout", "trainer"}
WORDS = ["--kills", str(KILLS), "--steps", "5", "--every", "2", "--workers", "1"]


def test_no_call_is_lost_or_made_twice_and_each_is_as_if_nobody_had_been_killed(
    tmp_path: Path,
) -> None:
    """Each victim once at least. What is checked is in the script; here, that there was something
    to check: answers that agents heard, calls of both runs under the same weights. Whether one of
    so few kills falls between two calls, which are then answered from the log, is chance."""
    workspace = Workspace(tmp_path)
    out = tmp_path / "found.json"
    words = ["-m", "tests.bench.agent_kills", *WORDS, "--seeds", str(SEED), "--dir", str(tmp_path)]
    try:
        done = workspace.run(sys.executable, *words, "--out", str(out), timeout_s=3 * UP_S)
        left = workspace.processes()
    finally:
        workspace.close()
    assert (0, {}) == (done.returncode, left), done.stdout
    found = json.loads(out.read_text(encoding="utf-8"))
    killed = found["killed"][str(SEED)]
    assert [] == found["problems"]
    assert (1, KILLS) == (killed["sittings"], sum(killed["kills"].values()))
    assert VICTIMS == killed["kills"].keys()
    calls, again = killed["calls"], killed["sampled_again_by_an_engine_alone"]
    assert calls["calls"] == again["calls"] > 5 * 4 * 2
    assert calls["heard"] > calls["calls"] // 2
    assert killed["against_the_run_without_kills"]["of_the_same_prompt_and_weights"] > 0
    assert (tmp_path / CALM / "run").is_dir()
