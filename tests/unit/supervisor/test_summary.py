"""The commands that `up` suggests at its end."""

from __future__ import annotations

import shlex

import pytest

from streams.views.evaluation import EvaluationPoint, EvaluationState
from tests.unit.report.sample_run import audit_report
from workers.config.run import RunConfig, RunSection
from workers.supervisor.ended import Ended, Outcome
from workers.supervisor.summary import accuracy_lines, next_commands, program_name, without
from workers.supervisor.up import Asked


@pytest.mark.parametrize(
    ("words", "kept"),
    [
        ("a.toml --run.id=demo", "a.toml"),
        ("a.toml --run.id demo --trainer.steps 5", "a.toml --trainer.steps 5"),
        ("'my file.toml' --run.dir=x", "'my file.toml'"),
        ("a.toml --run.identity=x", "a.toml --run.identity=x"),
    ],
)
def test_overrides_that_a_new_run_replaces_are_left_out(words: str, kept: str) -> None:
    """The suggested command names each field once, however the user typed it."""
    assert kept == without(words, "run.id", "run.dir")


def ended(outcome: Outcome, *, steps_typed: int = 0, folder: str = "runs/{id}") -> Ended:
    config = RunConfig(run=RunSection(id="mine", dir=folder))
    asked = Asked(
        config=config,
        command="up my.toml",
        is_resumed=False,
        is_live=False,
        steps_typed=steps_typed,
    )
    return Ended(
        config=config,
        command=asked.command,
        resume=asked.resume,
        outcome=outcome,
        failure=None,
        num_killed=0,
        audit=audit_report(),
    )


@pytest.mark.parametrize(
    ("outcome", "steps_typed", "resume"),
    [
        (Outcome.DRAINED, 0, "up my.toml --resume"),
        # The configured steps may be fewer than are done: nothing would go on.
        (Outcome.DRAINED, 150, "up my.toml --resume --steps 150"),
        (Outcome.FAILED, 150, "up my.toml --resume --steps 150"),
        (Outcome.COMPLETE, 150, "up my.toml --resume --steps 200"),
    ],
)
def test_what_continues_a_run_goes_on_to_the_steps_that_were_asked_for(
    outcome: Outcome, steps_typed: int, resume: str
) -> None:
    """A run that reached them is offered twice the configured ones."""
    assert next_commands(ended(outcome, steps_typed=steps_typed))[0].endswith(resume)


def test_commands_to_try_can_be_pasted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where folders have spaces in their names."""
    monkeypatch.setattr("sys.argv", ["my tools/rlstreams"])
    monkeypatch.setenv("PATH", "")
    commands = next_commands(ended(Outcome.COMPLETE, folder="my runs/one"))
    assert ["my tools/rlstreams"] == shlex.split(program_name())
    assert ["audit", "my runs/one"] == shlex.split(commands[1])[1:]
    assert ["--run.dir", "my runs/one-seed1"] == shlex.split(commands[2])[-2:]


def point(version: int, accuracy: float, num_samples: int) -> EvaluationPoint:
    return EvaluationPoint(
        policy_version=version,
        accuracy=accuracy,
        best=accuracy,
        num_rows=num_samples,
        num_samples=num_samples,
        num_issued=256,
        num_dead=256 - num_samples,
        num_exact=num_samples,
        num_tokens=1,
        finished_at_ms=1,
    )


@pytest.mark.parametrize(
    ("points", "told"),
    [
        ((), ()),
        ((point(0, 0.4, 256),), ("held-out accuracy 0.40 (version 0), over 256 answers",)),
        (
            (point(0, 0.4, 256), point(60, 0.9, 256)),
            (
                "held-out accuracy from 0.40 (version 0) to 0.90 (version 60), over 256 answers "
                "each",
            ),
        ),
        (
            (point(0, 0.4, 256), point(60, 0.9, 1)),
            (
                "held-out accuracy from 0.40 (version 0) to 0.90 (version 60), over 256 answers "
                "and 1",
            ),
        ),
    ],
)
def test_an_accuracy_says_over_how_many_answers_it_is(
    points: tuple[EvaluationPoint, ...], told: tuple[str, ...]
) -> None:
    """Answers that were set aside are none, so that two evaluations may differ in it."""
    assert told == tuple(accuracy_lines(EvaluationState(points=points)))
