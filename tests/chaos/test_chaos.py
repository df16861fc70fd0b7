"""Runs under faults, by the command that users have: kills, stops, zombies, crash points."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.bench.hardware import hardware
from tests.e2e.command import CONFIG, Workspace

pytestmark = pytest.mark.e2e

ROLES = ["broker", "logprob", "prompts", "records", "rollout", "trainer"]
# A small run: a step is 32 samples, and a restarted trainer has steps to do again.
SMALL = (
    "--trainer.groups_per_step=4", "--trainer.checkpoint_every=4", "--prompts.evaluate_rows=8",
    "--deadlines.stall_s=90", "--no-live",
)  # fmt: skip
CHAOS_S = 900.0  # about 75 on two idle cores
MANY = 200
EACH_POINT = Path(__file__).with_name("each_point.py")
RESULTS = Path(__file__).parents[1] / "bench/results/chaos-2026-11-21.json"


@pytest.fixture
def workspace(tmp_path: Path) -> Iterator[Workspace]:
    workspace = Workspace(tmp_path)
    yield workspace
    workspace.close()


def chaos(
    workspace: Workspace, *words: str, timeout_s: float = CHAOS_S
) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    """`python -m tests.chaos` of the demo to its end, and the figures that it wrote."""
    file = workspace.folder / "chaos.json"
    done = workspace.run(
        sys.executable, "-m", "tests.chaos", CONFIG, *words, f"--json={file}", timeout_s=timeout_s
    )
    assert file.is_file(), done.stdout
    return done, json.loads(file.read_text("utf-8"))


def check(done: subprocess.CompletedProcess[str], figures: dict[str, Any]) -> None:
    """What must hold under any faults."""
    assert 0 == done.returncode, done.stdout
    audit = figures["audit"]
    assert (0, 0) == (audit["lost"], audit["trained_twice"])
    written = {"unreadable step"} if "records" in figures["faults"] else set()
    assert audit["breach_counts"].keys() <= written
    assert figures["step_target"] == figures["steps"]
    assert figures["redone"]["steps"] == figures["redone"]["equal"]
    assert [] == figures["problems"]


@pytest.mark.slow
def test_a_few_faults_are_survived(workspace: Workspace) -> None:
    """Three victims in the first steps: the command strikes, waits, and judges what came out."""
    done, figures = chaos(workspace, "--kills=3", "--seed=30", "--every=1", "--steps=8", *SMALL)
    check(done, figures)
    assert 3 == sum(sum(kinds.values()) for kinds in figures["faults"].values())
    assert {} == workspace.processes()


@pytest.mark.slow
def test_nothing_is_lost_under_random_faults(workspace: Workspace) -> None:
    """Each kind of victim twice and more, in more steps than that takes."""
    done, figures = chaos(
        workspace, "--kills=16", "--seed=30", "--every=2", "--max-stop=6", "--points", "--steps=60",
        *SMALL,
    )  # fmt: skip
    check(done, figures)
    assert ROLES == sorted(figures["faults"])
    assert 16 == sum(sum(kinds.values()) for kinds in figures["faults"].values())
    assert 8 <= figures["processes_killed"]
    zombies = figures["zombies"]
    # A later fault may kill one before it meets its successor.
    assert 1 <= zombies["fenced"] == zombies["woken"] - zombies["ended_otherwise"], done.stdout
    assert {} == workspace.processes()


@pytest.mark.slow
def test_nobody_is_hurt_by_a_death_inside_the_kafka_client(workspace: Workspace) -> None:
    """Every role dies before and after its commit and its offsets, in the real client."""
    words = (CONFIG, "--demo.kills=[]", "--trainer.steps=6", *SMALL[:-1])
    done = workspace.run(sys.executable, str(EACH_POINT), *words, timeout_s=CHAOS_S)
    assert 0 == done.returncode, done.stdout
    figures = json.loads(done.stdout.splitlines()[-1])
    assert {"commit.after": 4, "commit.before": 4, "offsets.after": 2, "offsets.before": 2} == (
        figures["died"]
    )
    assert (0, 0) == (figures["lost"], figures["trained_twice"])


@pytest.mark.slow
def test_two_hundred_random_faults(workspace: Workspace) -> None:
    """The figures are kept in tests/bench/results, with seed and machine."""
    done, figures = chaos(
        workspace, f"--kills={MANY}", "--seed=2026", "--every=4", "--points", f"--steps={MANY}",
        "--rollout.workers=2", "--logprob.workers=2", *SMALL, timeout_s=3600.0,
    )  # fmt: skip
    told = json.dumps({**figures, "machine": hardware()}, indent=2, sort_keys=True)
    RESULTS.write_text(f"{told}\n", "utf-8")
    check(done, figures)
    for words in ("record runs/{run}", "replay recordings/{run} --into trainer"):
        again = workspace.run(
            "rlstreams", *words.format(run=figures["run"]).split(), timeout_s=3600.0
        )
        assert 0 == again.returncode, again.stdout
    assert MANY == sum(sum(kinds.values()) for kinds in figures["faults"].values())
