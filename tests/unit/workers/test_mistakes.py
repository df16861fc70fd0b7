"""What a newcomer types wrong is answered with what to type."""

from __future__ import annotations

import shlex
from dataclasses import asdict
from pathlib import Path

import pytest

from rlstreams.__main__ import main
from rlstreams.streams.log.text import plain_json
from rlstreams.streams.views.dead import list_command
from rlstreams.workers.config.load import load

DEMO = Path(__file__).parents[3] / "infra/examples/demo.toml"


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("", "Begin:\n  demo    see a tiny model learn while processes are killed; needs no files"),
        ("", "\n\nError: COMMAND is missing: name one of these\n"),
        ("broker", "Actions:\n  start   start it, unless it is running; it keeps running after"),
        ("broker", "\n\nError: ACTION is missing: name one of these\n"),
        ("broker status DEMO --port 1", "No such option: --port"),
        ("config server", "Missing argument 'KIND'. Choose from:\n\tvllm,\n\tsglang\n"),
        ("config server vlm", "Invalid value for 'KIND': 'vlm' is not one of 'vllm', 'sglang'."),
        ("replay step", "Missing argument 'N'.\n"),
        ("replay step runs/x 7", "Invalid value for 'N': 'runs/x' is not a valid whole number."),
        ("up rnu.toml", "rnu.toml: cannot be read: No such file or directory; did you mean 'run."),
        ("up zzzz.json", "zzzz.json: cannot be read: No such file or directory\n"),
        ("up trainer.steps=3", "No such file or directory; a field's value is written "
         "--trainer.steps=3\n"),
        ("--steps 2 up", "no option --steps before a command; write rlstreams COMMAND --steps ..."),
        ("replay branch no --at 3 --set trainer.optimizer.lrr=1",
         "unknown field trainer.optimizer.lrr; did you mean trainer.optimizer.lr?"),
        ("replay step 3 no --set trainer.steps", "'trainer.steps' has no value; write NAME=VALUE."),
        ("report no --out page.html", "--out page.html: name a folder; report.html and steps.csv"),
        ("grpo DEMO", "there is no grpo; did you mean up?\n"),
        ("worker logprob DEMO --ordinal 5",
         "--ordinal 5: logprob.workers is 1, so ordinals are 0\n"),
        ("worker trainer DEMO --ordinal 1", "--ordinal 1: a run has one trainer"),
        ("worker rollout DEMO --ordinal 9", "--ordinal 9: rollout.workers is"),
        ("audit DEMO --broker.bootstrap localhost",
         "broker.bootstrap must be `HOST:PORT[,HOST:PORT]`, got 'localhost'"),
        ("audit DEMO --broker.bootstrap 127.0.0.1:1", "no broker answers at 127.0.0.1:1: "),
        ("dead-letters show zzz DEMO", "like 17/3 or trajectories-0@41, got zzz; `rlstreams dead"),
        ("replay run run.toml", "run.toml is no recording: it is no folder with a manifest.json"),
        ("init new --from gsm8", "--from gsm8: cannot be read: No such file or directory; did you "
         "mean 'gsm8k'?"),
        ("init new --model modle", "--model: there is no folder '{0}/modle'; did you mean '{0}/"),
    ],
)  # fmt: skip
def test_a_mistake_is_answered_with_what_to_do(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    line: str,
    told: str,
) -> None:
    """On standard error, with a status that is not 0, and nothing is made."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.toml").touch()
    (tmp_path / "model").mkdir()
    words = [str(DEMO) if word == "DEMO" else word for word in shlex.split(line)]
    status = main(words)
    assert status in (1, 2, 78)
    assert told.format(tmp_path) in capsys.readouterr().err
    assert {"run.toml", "model"} == {path.name for path in tmp_path.iterdir()}


@pytest.mark.parametrize("words", ["pause", "drain", "scale rollout=2"])
def test_a_run_that_is_not_live_follows_no_wish(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: str
) -> None:
    """Its broker is not started for one that nobody reads: a resumed run runs."""
    (tmp_path / "broker").mkdir()
    (tmp_path / "broker/broker.json").write_text('{"pid": 0, "port": 1}')
    action, *more = words.split()
    assert 78 == main(["control", action, *more, str(DEMO), f"--run.dir={tmp_path}"])
    assert "run demo is not live: its broker has stopped" in capsys.readouterr().err
    assert ["broker.json"] == [path.name for path in (tmp_path / "broker").iterdir()]


def test_a_run_in_the_place_of_a_dead_letter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where there is no `run.toml`, which the words would then be looked for in."""
    monkeypatch.chdir(tmp_path)
    assert 78 == main(["dead-letters", "show", "runs/x"])
    assert "got runs/x; `rlstreams dead-letters list` has them" in capsys.readouterr().err


def test_no_recording_is_no_dead_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the command that makes one."""
    monkeypatch.chdir(tmp_path)
    assert 1 == main(["record", "list"])
    assert (
        "no recording in recordings; make one: rlstreams record run RUN" in capsys.readouterr().out
    )


def test_a_broker_is_named_as_its_run_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By folder or file: the run's own; any other folder is one; a broker elsewhere is refused."""
    monkeypatch.chdir(tmp_path)
    config = load([str(DEMO)], ["run.id=mine"])
    folder = tmp_path / "runs/mine"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(plain_json(asdict(config)), "utf-8")
    for name, place in (
        ("runs/mine", "runs/mine/broker"),
        (str(DEMO), "runs/demo/broker"),
        ("own", "own"),
        ("", "runs/broker"),
    ):
        assert 1 == main(["broker", "status", *shlex.split(name)])
        assert f"no broker runs in {place}\n" == capsys.readouterr().out
    other = load([str(DEMO)], ["broker.bootstrap=far:9092"])
    (folder / "config.json").write_text(plain_json(asdict(other)), "utf-8")
    assert 78 == main(["broker", "stop", "runs/mine"])
    assert "broker.bootstrap names far:9092, which is not ours" in capsys.readouterr().err


def test_a_command_that_is_shown_can_be_pasted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where a folder's name has a space."""
    monkeypatch.chdir(tmp_path)
    assert 0 == main(["init", "my sums"])
    assert "\n  cd 'my sums'\n" in capsys.readouterr().out
    assert "rlstreams dead-letters list 'runs/my sums'" == list_command("runs/my sums")
