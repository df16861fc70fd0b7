"""The demo from the command to its last line: killed three times, audited, and resumed."""

from __future__ import annotations

import re
import shlex
import subprocess

import pytest

from rlstreams import open_run
from rlstreams.schemas.events import StepCompleted, TrainerStarted, Trajectory, WorkerReport
from rlstreams.streams.log.topics import STEPS, TRAJECTORIES, WORKER_EVENTS
from rlstreams.streams.views.feed import Feed, Views
from rlstreams.workers.bootstrap.parts import place_of
from rlstreams.workers.config.load import load
from tests.conftest import DEMO_WORDS
from tests.e2e.command import CONFIG, Workspace
from tests.e2e.test_demo_log import audit, steps

READ_S = 60.0
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
    assert re.fullmatch(
        r"[\d.]+ % of the time was training; .* tokens sampled in vain[:;] .*", cost
    )
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
    """Resume, web, inspect and audit; the last one is tried as it stands, and it is clean."""
    resume, page, _, audit_again = (shlex.split(line) for line in lines[-4:])
    assert ["rlstreams", "web", "runs/demo"] == page
    assert ["--resume", "--steps", "24"] == resume[-3:]
    done = workspace.run(*audit_again)
    assert 0 == done.returncode, done.stdout
    assert "ok: every sample accounted for" in done.stdout
    assert {} == workspace.processes(), "the broker that was started for a look lives on"


def test_its_cost_is_what_the_records_say(
    workspace: Workspace, finished_run: tuple[Workspace, subprocess.CompletedProcess[str]]
) -> None:
    """Share of the time, tokens in vain and each death, counted here from the records alone; before
    the run goes on."""
    folder = workspace.folder / "runs/demo"
    config = load([workspace.folder / CONFIG], [f"run.dir={folder}"])
    with open_run(place_of(config)) as log:
        found = {
            topic: [record.event for record in log.read_topic(topic)]
            for topic in (STEPS, TRAJECTORIES, WORKER_EVENTS)
        }
        views = Views()
        feed = Feed(log.bus, views)
        feed.catch_up(READ_S)
        feed.close()
    made = [e for e in found[STEPS] if isinstance(e, StepCompleted)]
    answers = [e for e in found[TRAJECTORIES] if isinstance(e, Trajectory)]
    reports = [e for e in found[WORKER_EVENTS] if isinstance(e, WorkerReport)]
    last = {report.instance: report for report in reports}  # of each process
    rollouts = [report for report in last.values() if report.role == "rollout"]
    trained = {(ref.group_id, ref.sample) for step in made for ref in step.samples}

    cost = views.state.cost
    wall_ms = made[-1].finished_at_ms - made[0].started_at_ms
    busy_ms = sum(step.finished_at_ms - step.started_at_ms for step in made)
    assert cost.training_share == pytest.approx(busy_ms / wall_ms)
    assert cost.sampled_tokens == sum(r.counters["sampled_tokens"] for r in rollouts)
    in_answers = sum(
        len(s.token_ids)
        for a in answers
        if a.purpose == "evaluate" or (a.group_id, a.sample) in trained
        for s in a.segments
        if s.author == "policy"
    )
    old = next(r.instance for r in rollouts if r.worker == "rollout-0")  # it was killed
    left = last[old].counters["sampled_tokens"] - last[old].counters.get("tokens", 0)
    assert cost.in_vain.get("died", 0) == left
    # Of the rest something waits for a step that nobody makes any more, or came behind the last
    # report of a process that died.
    assert in_answers + sum(cost.in_vain.values()) == pytest.approx(cost.sampled_tokens, rel=0.1)
    times = {}
    for worker in ("rollout-0", "logprob-0", "trainer-0"):  # the killed ones, once each
        old, new = dict.fromkeys(r.instance for r in reports if r.worker == worker)
        work_ms = [r.at_ms for r in reports if r.instance == new and r.counters.get("samples")]
        work_ms += [a.finished_at_ms for a in answers if a.instance == new]
        work_ms += [step.finished_at_ms for step in made if step.instance == new]
        times[worker] = (min(work_ms) - last[old].at_ms) / 1000
    assert {death.worker: death.seconds for death in cost.deaths} == times
    (line,) = [x for x in finished_run[1].stdout.splitlines() if "sampled in vain" in x]
    assert f"{100 * busy_ms / wall_ms:.1f} % of the time was training" in line
    for worker, seconds in times.items():
        assert f"{seconds:.1f} s from the death of a {worker[:-2]} process" in line


@pytest.mark.slow
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
