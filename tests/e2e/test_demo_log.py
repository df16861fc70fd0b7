"""The log of the finished demo, while its broker runs: an independent judge, and the model."""

from __future__ import annotations

import json
import shlex
import subprocess

import pytest

from rlstreams import open_run
from rlstreams.schemas.events import (
    ScoredTrajectory,
    StepCompleted,
    TrainerStarted,
    Trajectory,
    WorkerReport,
)
from rlstreams.streams.kafka.admin_ask import admin_settings
from rlstreams.streams.log.topics import SCORED, STEPS, TRAJECTORIES, WORKER_EVENTS
from rlstreams.streams.run.place import RunPlace
from rlstreams.streams.views.feed import Feed, Views
from rlstreams.workers.bootstrap.parts import place_of
from rlstreams.workers.config.load import load
from tests.e2e.command import CONFIG, ROOT, Workspace
from tests.integration import judge
from tests.integration.stranger import schemas_from_folder

READ_S = 60.0


def audit(workspace: Workspace) -> dict[str, object]:
    """The report of `rlstreams audit --json`, which starts the run's broker for a look."""
    done = workspace.run("sh", "-c", f"rlstreams audit {CONFIG} --json 2>audit.err")
    assert 0 == done.returncode, done.stdout
    report: dict[str, object] = json.loads(done.stdout)
    return report


def steps(workspace: Workspace) -> list[StepCompleted | TrainerStarted]:
    """Claims and steps, in the order of the log."""
    folder = workspace.folder / "runs/demo"
    config = load([workspace.folder / CONFIG], [f"run.dir={folder}"])
    with open_run(place_of(config)) as log:
        found = [record.event for record in log.read_topic(STEPS)]
    return [event for event in found if isinstance(event, StepCompleted | TrainerStarted)]


def test_both_log_prob_workers_score(looked_at: Workspace) -> None:
    """One of them was killed; its successor or the other one goes on, and nothing is missing."""
    config = load([looked_at.folder / CONFIG], [f"run.dir={looked_at.folder / 'runs/demo'}"])
    with open_run(place_of(config)) as log:
        scored = [record.event for record in log.read_topic(SCORED)]
    assert {"logprob-0", "logprob-1"} == {
        event.worker for event in scored if isinstance(event, ScoredTrajectory)
    }


def test_an_independent_judge_agrees(looked_at: Workspace) -> None:
    """Written from the README of the schemas alone; with the run's password, behind three kills."""
    report = audit(looked_at)
    place = RunPlace.of_folder(looked_at.folder / "runs/demo")
    with place.served() as bootstrap:
        login = admin_settings(place.client_options)
        log, commits = judge.read_run(bootstrap, place.run, **login)
    found = judge.Judge(log, commits, schemas_from_folder(ROOT / "rlstreams/schemas"))
    told = {name: report[name] for name in ("trained", "evaluated", "lost")}
    assert told == {name: found.classes[name] for name in told}
    assert report["trained_twice"] == found.twice
    assert report["issued"] == found.classes.total()


def test_its_cost_is_what_the_records_say(
    looked_at: Workspace, finished_run: tuple[Workspace, subprocess.CompletedProcess[str]]
) -> None:
    """Share of the time, tokens in vain and each death, counted here from the records alone."""
    folder = looked_at.folder / "runs/demo"
    config = load([looked_at.folder / CONFIG], [f"run.dir={folder}"])
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


def test_the_trained_model_comes_out(
    looked_at: Workspace, finished_run: tuple[Workspace, subprocess.CompletedProcess[str]]
) -> None:
    """The line about the model is a command, and the library loads the last version from it."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    lines = finished_run[1].stdout.splitlines()
    (line,) = [line for line in lines if line.startswith("model:")]
    done = looked_at.run(*shlex.split(line)[1:])
    assert 0 == done.returncode, done.stdout
    out = looked_at.folder / "runs/demo/export"
    facts = json.loads((out / "rlstreams.json").read_text("utf-8"))
    made = [event for event in steps(looked_at) if isinstance(event, StepCompleted)]
    assert made[-1].weight_hash == facts["weight_hash"]
    model = AutoModelForCausalLM.from_pretrained(out)
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert model.config.vocab_size >= len(tokenizer)
