"""A recorded demo, with its run and broker gone: the trainer, the scorer, and one step again."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.command import UP_S, Workspace

Run = tuple[Workspace, subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def recorded(finished_run: Run) -> Iterator[Workspace]:
    """The workspace with `recordings/demo`; the run's folder and its broker's log are elsewhere."""
    workspace, _ = finished_run
    record = ("rlstreams", "record", "run", "runs/demo", "--checkpoints", "--weights")
    made = workspace.here(*record)
    assert made.returncode == 0, made.stdout
    run, away = workspace.folder / "runs/demo", workspace.folder / "away"
    run.rename(away)
    yield workspace
    away.rename(run)


def test_what_was_recorded_is_whole_and_replays_bit_for_bit(recorded: Workspace) -> None:
    """Every step of the real trainer is equal, then every score of the real log-prob worker."""
    listed = recorded.here("rlstreams", "record", "verify")
    assert (0, True) == (listed.returncode, "every byte verified" in listed.stdout)

    into = ("rlstreams", "replay")
    again = ("--as", "again", "--keep-weights")
    trained = recorded.here(*into, "trainer", "recordings/demo", *again)
    found = re.search(r"^(\d+) of (\d+) steps equal, bit for bit", trained.stdout, re.MULTILINE)
    assert found is not None, trained.stdout
    num_steps = int(found[2])
    assert (num_steps, True) == (int(found[1]), num_steps >= 12)  # an earlier test may go on to 14
    assert 0 == trained.returncode

    weights = ("--weights", "runs/again/weights", "--steps", "1:3")
    scored = recorded.here(*into, "logprob", "recordings/demo", *weights)
    versions = num_steps + 1
    told = f"weights of {versions} of {versions} versions are available"
    assert told in scored.stdout, scored.stdout
    assert "equal, bit for bit; 0 different, 0 not scored" in scored.stdout, scored.stdout
    assert 0 == scored.returncode


def test_a_recording_is_audited(recorded: Workspace) -> None:
    audited = recorded.here("rlstreams", "audit", "recordings/demo")
    told = r"^ok(: every sample accounted for| as far as a recording tells: \d+ in flight, .*)$"
    assert re.search(told, audited.stdout, re.MULTILINE), audited.stdout
    assert 0 == audited.returncode


@pytest.mark.slow
def test_a_run_is_played_again_and_is_no_run_to_be_audited(recorded: Workspace) -> None:
    """The replay's records lie elsewhere than its steps say."""
    replay = ("rlstreams", "replay", "run", "recordings/demo", "--as", "copy")
    played = recorded.run(*replay, timeout_s=UP_S)
    assert 0 == played.returncode, played.stdout
    audited = recorded.run("rlstreams", "audit", "runs/copy", timeout_s=UP_S)
    assert "audit the recording" in audited.stdout, audited.stdout
    assert 78 == audited.returncode


def test_a_step_is_run_again_and_changed(recorded: Workspace) -> None:
    """Equal as it was; with another clip range, another step, labelled as an experiment."""
    setting = "trainer.loss.clip_high=0.01"
    found = recorded.here("rlstreams", "replay", "step", "5", "recordings/demo", "--set", setting)

    assert "every one is equal, bit for bit" in found.stdout, found.stdout
    assert "CHANGED: trainer.loss.clip_high = 0.01 (was 0.28)" in found.stdout
    assert "offline experiment on recorded data" in found.stdout
    assert 0 == found.returncode


def test_answers_are_judged_again(recorded: Workspace) -> None:
    """By the run's own reward nothing changes, and the recorded advantages come out; by another
    one samples and steps would."""
    own = recorded.here("rlstreams", "replay", "judge", "recordings/demo")
    assert "; 0 changed; 0 without a reward" in own.stdout, own.stdout
    exact = re.search(r"^(\d+) of (\d+) steps: the recorded", own.stdout, re.MULTILINE)
    assert exact is not None, own.stdout
    assert (exact[1], own.returncode) == (exact[2], 0)
    other = recorded.here(
        "rlstreams", "replay", "judge", "recordings/demo", "--verifier", "exact", "--json"
    )
    found = json.loads(other.stdout)
    assert 1 == other.returncode
    assert found["changed"] == len(found["samples"]) > 0
    assert found["steps_changed"]


@pytest.mark.slow
def test_a_branch_goes_on_and_needs_nothing_else(recorded: Workspace) -> None:
    """Two steps of its own from the parent's bits, the trainer killed between them; the audit finds
    those bits in the recording; its own step is run again, one of the parent's is not."""
    settings = (
        "trainer.steps=7", "trainer.optimizer.lr=1e-4", "logprob.workers=1",
        "demo.kills=[{role='trainer', at=0.8}]",
    )  # fmt: skip
    words = [word for setting in settings for word in ("--set", setting)]
    branch = ("rlstreams", "replay", "branch", "recordings/demo", "--at", "5", "--as", "branched")
    made = recorded.run(*branch, *words, timeout_s=UP_S)
    assert 0 == made.returncode, made.stdout
    told = r"branch of demo at step 5, weights (\w+), changed: .*trainer.optimizer.lr 0.0001 \(was "
    assert (found := re.search(told, made.stdout)), made.stdout
    again = recorded.run(*branch)
    assert (78, True) == (again.returncode, "is in use" in again.stdout)

    ran = recorded.run("rlstreams", "up", "runs/branched", timeout_s=UP_S)
    assert 0 == ran.returncode, ran.stdout
    assert "KILLED trainer-0" in ran.stdout
    assert "steps 6 to 6 were done again from the log: 1 of 1 weight hashes equal" in ran.stdout
    page = (recorded.folder / "runs/branched/report.html").read_text("utf-8")
    assert f"branch of demo at step 5, weights {found[1]}" in page
    audited = recorded.run("rlstreams", "audit", "runs/branched", timeout_s=UP_S)
    assert 0 == audited.returncode, audited.stdout
    assert f"begins at step 5 of run demo, weights {found[1]}" in audited.stdout
    assert "; as its parent's log says" in audited.stdout
    own = recorded.run("rlstreams", "replay", "step", "7", "runs/branched", timeout_s=UP_S)
    assert "every one is equal, bit for bit" in own.stdout, own.stdout
    other = recorded.run("rlstreams", "replay", "step", "4", "runs/branched")
    assert 78 == other.returncode
    assert "rlstreams replay step 4 " in other.stdout
    assert "recordings/demo" in other.stdout


def test_what_is_not_there_is_said_with_what_is(recorded: Workspace, tmp_path: Path) -> None:
    """Steps, checkpoints, folders."""
    gone = recorded.here("rlstreams", "replay", "step", "77", "recordings/demo")
    # 12, or 14 where an earlier test has gone on with the run
    assert re.search(
        r"step 77 was never completed: the log holds steps 1 to 1[24]$", gone.stdout, re.M
    )
    seek = recorded.here("rlstreams", "replay", "run", "recordings/demo", "--steps", "99:")
    assert re.search(r"none of the steps .* there is steps 1 to 1[24]$", seek.stdout, re.M)
    model = recorded.here(
        "rlstreams", "replay", "step", "3", "recordings/demo", "--model", str(tmp_path)
    )
    assert 78 == model.returncode, model.stdout
    assert str(tmp_path) in model.stdout
