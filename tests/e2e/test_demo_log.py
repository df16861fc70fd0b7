"""The log of the finished demo, while its broker runs: an independent judge, and the model."""

from __future__ import annotations

import json
import shlex
import subprocess

from rlstreams import open_run
from rlstreams.schemas.events import ScoredTrajectory, StepCompleted, TrainerStarted
from rlstreams.streams.kafka.admin_ask import admin_settings
from rlstreams.streams.log.topics import SCORED, STEPS
from rlstreams.streams.run.place import RunPlace
from rlstreams.workers.bootstrap.parts import place_of
from rlstreams.workers.config.load import load
from tests.e2e.command import CONFIG, ROOT, Workspace
from tests.integration import judge
from tests.integration.stranger import schemas_from_folder


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


def test_the_answers_to_look_at_next_are_shown(
    looked_at: Workspace, finished_run: tuple[Workspace, subprocess.CompletedProcess[str]]
) -> None:
    """By the line that `up` ended with."""
    *_, answers, _ = finished_run[1].stdout.splitlines()
    assert "rlstreams inspect" in answers
    done = looked_at.run(*shlex.split(answers))
    assert 0 == done.returncode, done.stdout


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


def test_the_trained_model_comes_out(
    looked_at: Workspace, finished_run: tuple[Workspace, subprocess.CompletedProcess[str]]
) -> None:
    """The line about the model is a command, and the library loads the last version from it."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    lines = finished_run[1].stdout.splitlines()
    (line,) = [line for line in lines if line.startswith("model:")]
    done = looked_at.here(*shlex.split(line)[1:])
    assert 0 == done.returncode, done.stdout
    out = looked_at.folder / "runs/demo/export"
    facts = json.loads((out / "rlstreams.json").read_text("utf-8"))
    made = [event for event in steps(looked_at) if isinstance(event, StepCompleted)]
    assert made[-1].weight_hash == facts["weight_hash"]
    model = AutoModelForCausalLM.from_pretrained(out)
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert model.config.vocab_size >= len(tokenizer)
