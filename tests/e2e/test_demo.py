"""The demo from the command to its last line: killed three times, audited, and resumed."""

from __future__ import annotations

import re
import shlex
import subprocess

import pytest

from rlstreams.schemas.events import StepCompleted, TrainerStarted
from tests.conftest import DEMO_WORDS
from tests.e2e.command import Workspace
from tests.e2e.test_demo_log import audit, steps

STEPS_AT_FIRST = 12
SAMPLES_PER_STEP = 16 * 8
ROWS = 32  # of each evaluation
NUM_EVALUATIONS = 3  # versions 0, 10 and 12


@pytest.fixture(scope="module")
def lines(finished_run: tuple[Workspace, subprocess.CompletedProcess[str]]) -> list[str]:
    """What the first run printed."""
    return finished_run[1].stdout.splitlines()


@pytest.fixture(scope="module")
def workspace(finished_run: tuple[Workspace, subprocess.CompletedProcess[str]]) -> Workspace:
    return finished_run[0]


def test_it_ends_well(finished_run: tuple[Workspace, subprocess.CompletedProcess[str]]) -> None:
    _, done = finished_run
    assert 0 == done.returncode, done.stdout
    killed = re.findall(r"KILLED (\S+) \(process \d+\) with SIGKILL after step (\d+)", done.stdout)
    assert ["rollout-0", "logprob-0", "trainer-0"] == [worker for worker, _ in killed]


def test_the_last_lines_say_how_it_went(lines: list[str]) -> None:
    """Accuracy before and after, where every sample is, what was done again, what to try next."""
    accuracy, fates, cost, redone, outcome, *paths = lines[-13:-5]
    assert re.fullmatch(
        r"held-out accuracy from 0\.\d\d \(version 0\) to 0\.\d\d \(version 12\), "
        rf"over {ROWS} answers each",
        accuracy,
    )
    assert fates.startswith("3 processes killed, ")
    assert fates.endswith("; lost 0, trained twice 0 (read from the log)")
    assert re.fullmatch(r"[\d.]+ % of the time was training; .* tokens sampled in vain: .*", cost)
    again = re.fullmatch(r"steps 1 to (\d+) were done again .*: (\d+) of (\d+) .* equal", redone)
    assert again is not None, redone
    assert 10 <= int(again[1]) < STEPS_AT_FIRST
    assert again[1] == again[2] == again[3]
    assert "run demo: complete" == outcome
    assert ["report:", "logs:", "model:"] == [path.split()[0] for path in paths]
    assert "try next:" == lines[-5]
    assert all(line.startswith("  rlstreams ") for line in lines[-4:])
    assert "  rlstreams audit runs/demo" == lines[-1]


def test_the_counts_add_up(lines: list[str]) -> None:
    """Every issued sample is in one class; what was trained is what the steps took."""
    (line,) = [line for line in lines if "samples issued" in line]
    counts = {
        name: int(re.search(pattern, line)[1].replace(",", ""))  # type: ignore[index]
        for name, pattern in {
            "issued": r"([\d,]+) samples issued",
            "trained": r"trained ([\d,]+)",
            "dropped": r"dropped ([\d,]+)",
            "evaluated": r"evaluated ([\d,]+)",
            "in flight": r"in flight ([\d,]+)",
        }.items()
    }
    assert STEPS_AT_FIRST * SAMPLES_PER_STEP == counts["trained"]
    assert NUM_EVALUATIONS * ROWS == counts["evaluated"]
    assert counts.pop("issued") == sum(counts.values())


def test_the_report_is_where_it_says(workspace: Workspace, lines: list[str]) -> None:
    """A page that needs nothing else."""
    (page,) = (
        workspace.folder / line.split(maxsplit=1)[1]
        for line in lines
        if line.startswith("report: ")
    )
    assert "report.html" == page.name
    html = page.read_text("utf-8")
    assert "demo" in html
    assert not re.search(r"(src|href)=\"?https?:", html)


def test_nothing_is_left_running(workspace: Workspace) -> None:
    """Workers, fork server and broker are gone."""
    assert {} == workspace.processes()


def test_the_commands_to_try_next_are_commands(workspace: Workspace, lines: list[str]) -> None:
    """Resume, web, inspect and audit; the last two are tried as they stand, and it is clean."""
    resume, page, answers, audit_again = (shlex.split(line) for line in lines[-4:])
    assert ["rlstreams", "web", "runs/demo"] == page
    assert 0 == workspace.run(*answers).returncode
    assert ["--resume", "--steps", "24"] == resume[-3:]
    done = workspace.run(*audit_again)
    assert 0 == done.returncode, done.stdout
    assert "ok: every sample accounted for" in done.stdout
    assert {} == workspace.processes(), "the broker that was started for a look lives on"


def test_a_run_that_has_steps_is_not_begun_again(workspace: Workspace) -> None:
    """The same words again: status 78 and both ways out."""
    done = workspace.up("--steps", "12", *DEMO_WORDS)
    assert 78 == done.returncode, done.stdout
    assert "--resume" in done.stdout
    assert "--run.id" in done.stdout


def test_a_finished_run_goes_on(workspace: Workspace) -> None:
    """`--resume` with a higher target: a new epoch makes the next steps, and none twice; the
    tracker has each step and each evaluation once."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    done = workspace.up("--steps", "14", *DEMO_WORDS, "--resume")
    assert 0 == done.returncode, done.stdout
    assert "(version 14)" in done.stdout

    tracked = EventAccumulator(str(workspace.folder / "tb/demo")).Reload()
    assert list(range(1, 15)) == [point.step for point in tracked.Scalars("step/reward")]
    assert [0, 10, 12, 14] == [p.step for p in tracked.Scalars("evaluation/mean_reward")]
    log = steps(workspace)
    made = [(event.step, event.epoch) for event in log if isinstance(event, StepCompleted)]
    claims = [(c.epoch, c.next_step) for c in log if isinstance(c, TrainerStarted)]
    (_, first), (_, killed_at), (_, resumed_at) = claims
    assert [1, 2, 3] == [epoch for epoch, _ in claims]
    assert (1, STEPS_AT_FIRST + 1) == (first, resumed_at)
    epochs = [1 + (n >= killed_at) + (n >= resumed_at) for n in range(1, 15)]
    assert list(zip(range(1, 15), epochs, strict=True)) == made
    report = audit(workspace)
    assert (14, 14 * SAMPLES_PER_STEP, 0, 0) == tuple(
        report[name] for name in ("steps", "trained", "lost", "trained_twice")
    )
