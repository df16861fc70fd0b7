"""The commands that `up` suggests at its end."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from rlstreams.__main__ import parsed
from rlstreams.show.report.collect import PAGE_FILE
from rlstreams.show.report.fold import RunFold
from rlstreams.streams.audit.report import AuditReport
from rlstreams.streams.run.run_log import BusLog
from rlstreams.streams.views.evaluation import EvaluationPoint, EvaluationState
from rlstreams.up.supervisor.fault_hook import EndedRun, RunOutcome, UpOptions
from rlstreams.up.supervisor.summary import (
    accuracy_lines,
    model_lines,
    next_commands,
    program_name,
    summarize,
)
from rlstreams.workers.config.run import RunConfig, RunSection
from tests.logs import made_log
from tests.memory.bus import MemoryBus
from tests.unit.report.sample_run import audit_report


def ended(
    outcome: RunOutcome,
    *,
    steps_typed: int = 0,
    folder: str = "runs/{id}",
    run_id: str = "mine",
    command: str = "up my.toml",
    step: int = 0,
    audit: AuditReport | None = None,
) -> EndedRun:
    config = RunConfig(run=RunSection(id=run_id, dir=folder))
    options = UpOptions(
        config=config,
        command=command,
        is_resumed=False,
        is_live=False,
        steps_typed=steps_typed,
    )
    return EndedRun(
        options=options,
        step=step,
        outcome=outcome,
        failure=None,
        num_killed=0,
        is_claimed=False,
        audit=audit,
    )


@pytest.mark.parametrize(
    ("outcome", "audit", "status"),
    [
        (RunOutcome.COMPLETE, None, 0),
        (RunOutcome.FAILED, None, 1),
        (RunOutcome.COMPLETE, audit_report(), 0),
        (RunOutcome.COMPLETE, audit_report(lost=1, breach_counts={"lost": 1}), 1),
    ],
)
def test_a_run_without_an_audit_has_a_summary(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    outcome: RunOutcome,
    audit: AuditReport | None,
    status: int,
) -> None:
    """A replay wrote its steps: it is told how it ended, with no word of where samples are."""
    (tmp_path / PAGE_FILE).write_text("of the start before")
    made, bus = ended(outcome, folder=str(tmp_path), audit=audit), MemoryBus(made_log(), "run")
    assert status == summarize(made, RunFold().state, BusLog(bus, "mine"))
    told = capsys.readouterr().out
    assert f"run mine: {outcome}" in told
    assert ("samples issued" in told) == (audit is not None)


@pytest.mark.parametrize(
    ("outcome", "steps_typed", "resume"),
    [
        (RunOutcome.DRAINED, 0, "up my.toml --resume"),
        # The configured steps may be fewer than are done: nothing would go on.
        (RunOutcome.DRAINED, 150, "up my.toml --resume --steps 150"),
        (RunOutcome.FAILED, 150, "up my.toml --resume --steps 150"),
        (RunOutcome.COMPLETE, 150, "up my.toml --resume --steps 200"),
    ],
)
def test_what_continues_a_run_goes_on_to_the_steps_that_were_asked_for(
    outcome: RunOutcome, steps_typed: int, resume: str
) -> None:
    """A run that reached them is offered twice the configured ones."""
    assert next_commands(ended(outcome, steps_typed=steps_typed))[0].endswith(resume)


def test_a_run_that_came_farther_than_configured_is_offered_more() -> None:
    """`--resume --steps` of what is done would do nothing."""
    (resume, *_) = next_commands(ended(RunOutcome.COMPLETE, step=300))
    assert resume.endswith("--resume --steps 600")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to work in; the shell finds nothing."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "")
    return tmp_path


def script(path: Path, text: str = "#!/bin/sh\n") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


def test_commands_to_try_can_be_pasted(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where folders have spaces in their names, and the shell does not find us."""
    tool = script(here / "my tools/rlstreams")
    monkeypatch.setattr("sys.executable", str(here / "my tools/python"))
    commands = next_commands(ended(RunOutcome.COMPLETE, folder="my runs/one"))
    assert ["my tools/rlstreams", "audit", "my runs/one"] == shlex.split(commands[3])
    (here / "elsewhere").mkdir()
    monkeypatch.chdir(here / "elsewhere")
    assert [str(tool)] == shlex.split(program_name())


def test_the_name_of_the_program_starts_us(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another environment's script of that name is not ours; without one Python runs us."""
    monkeypatch.setattr("sys.executable", str(here / "own/python"))
    assert f"{here}/own/python -m rlstreams" == program_name()
    own, other = script(here / "own/rlstreams"), script(here / "other/rlstreams")
    monkeypatch.setenv("PATH", str(other.parent))
    assert "own/rlstreams" == program_name()
    other.unlink()
    other.symlink_to(own)
    assert "rlstreams" == program_name()


@pytest.mark.parametrize(
    ("command", "last"),
    [
        ("up my.toml --data.train=x", "doctor my.toml --data.train=x"),
        ("up", "doctor"),  # of ./run.toml
        ("demo", "audit runs/mine"),
    ],
)
def test_a_run_that_failed_is_looked_at(command: str, last: str) -> None:
    """The demo has no file that could be looked at."""
    assert next_commands(ended(RunOutcome.FAILED, command=command))[-1].endswith(f" {last}")


@pytest.mark.parametrize("outcome", RunOutcome)
@pytest.mark.parametrize("command", ["up my.toml --data.train='my rows'", "demo --run.id=demo"])
def test_every_command_is_one(here: Path, outcome: RunOutcome, command: str) -> None:
    """The parser takes each as it is printed."""
    (here / "run/checkpoints/000001-00000005").mkdir(parents=True)
    made = ended(outcome, command=command, steps_typed=5, folder="my run")
    lines = (*next_commands(made), *(line.removeprefix("model:") for line in model_lines("run", 5)))
    program = shlex.split(program_name())
    for line in lines:
        words = shlex.split(line)
        assert program == words[: len(program)]
        parsed(words[len(program) :])


def test_the_model_is_offered_where_there_is_one(here: Path) -> None:
    """Not before the first checkpoint, and never into a folder that is taken."""
    run = here / "my run"
    run.mkdir()
    assert () == model_lines("my run", 5)
    (run / "checkpoints/000001-00000005").mkdir(parents=True)
    assert () == model_lines("my run", 0)
    told = []
    for name in ("export", "export-5", ""):
        told += [shlex.split(line)[-3:] for line in model_lines("my run", 5)]
        script(run / name / "file")
    assert told == [["my run", "--out", f"my run/{name}"] for name in ("export", "export-5")]


def point(version: int, accuracy: float, num_samples: int) -> EvaluationPoint:
    return EvaluationPoint(
        policy_version=version,
        accuracy=accuracy,
        best=accuracy,
        num_rows=num_samples,
        num_samples=num_samples,
        num_issued=256,
        num_dead=256 - num_samples,
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
