"""The console script: quick help, overrides, errors in one line, and packages that are ours."""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from rlstreams.__main__ import MOVED, main, parsed
from rlstreams.cli.options import split_overrides
from rlstreams.streams.log.errors import ConfigError
from rlstreams.workers.loop import log
from rlstreams.workers.loop.host import commit

ROOT = Path(__file__).parents[3]


def test_overrides_are_told_from_options():
    """A dot makes the difference; values may look like anything."""
    line = ["up", "a.toml", "--a.b", "-1", "--steps", "3", "--c.d.e=x=y", "--out", "f.html"]
    expected = (
        ["up", "a.toml", "--steps", "3", "--out", "f.html"],
        ["--a.b", "-1", "--c.d.e=x=y"],
    )
    assert expected == split_overrides(line)
    assert (["a.toml", "--", "--odd.toml"], []) == split_overrides(["a.toml", "--", "--odd.toml"])


def test_config_show(tmp_path, capsys):
    file = tmp_path / "run.toml"
    file.write_text("[run]\nid = 'shown'\n[[demo.kills]]\nrole = 'rollout'\nat = 0.5\n")
    words = ["config", "show", str(file), "--trainer.steps", "7"]
    assert 0 == main(words)
    text = capsys.readouterr().out
    tree = tomllib.loads(text)
    assert 0 == main([*words, "--json"])
    assert json.loads(capsys.readouterr().out) == tree
    assert f'id = "shown"  # {file}:2:1' in text
    assert "steps = 7  # override --trainer.steps" in text


def test_a_configuration_error_is_one_line(tmp_path, capsys):
    """Exit 78, no traceback."""
    file = tmp_path / "run.toml"
    file.write_text("[trainer]\nstps = 3")
    assert 78 == main(["config", "show", str(file)])
    captured = capsys.readouterr()
    assert "" == captured.out
    assert 1 == len(captured.err.splitlines())
    assert "did you mean trainer.steps?" in captured.err


@pytest.mark.parametrize("words", [[], ["nonsense"], ["config"]])
def test_usage_errors_exit_with_2(words, capsys):
    """What is missing is said on stderr."""
    assert 2 == main(words)
    assert "Usage: rlstreams" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "usage", "told"),
    [
        (["adit"], "rlstreams", "there is no adit; did you mean audit?"),
        (["audit", "--jsn"], "rlstreams audit", "No such option: --jsn Did you mean --json?"),
        (
            ["up", "--step=3"],
            "rlstreams up",
            "No such option: --step (Possible options: --help, --steps)",
        ),
        (
            ["up", "--trainer=3"],
            "rlstreams up",
            "--trainer is a section: one field of it is set by",
        ),
        (["worker", "--instanc=3"], "rlstreams worker", "No such option: --instanc\n"),
        (["config", "shw"], "rlstreams config", "there is no shw; did you mean show?"),
        (
            ["record", "diff", "a", "b", "c"],
            "rlstreams record diff",
            "Got unexpected extra argument (c)",
        ),
        (["inspect", "--worst", "x"], "rlstreams inspect", "'--worst': 'x' is not one of 'mismat"),
        (["broker", "stop", "--run.id=x"], "rlstreams broker stop", "stop reads no configuration"),
    ],
)
def test_a_word_that_is_not_known_is_answered_with_what_was_meant(words, usage, told, capsys):
    """Under the usage of the command that was asked, not of the whole program."""
    assert 2 == main(words)
    said = capsys.readouterr().err
    assert said.startswith(f"Usage: {usage} ")
    assert told in said


@pytest.mark.parametrize("name", MOVED)
def test_a_command_of_before_is_answered_with_the_one_of_today(name, capsys):
    """In one sentence, whose commands there are."""
    assert 2 == main([name, "runs/demo"])
    said = capsys.readouterr().err
    assert f"Error: `rlstreams {name}` is now {MOVED[name]}\n" in said
    for line in re.findall(r"`rlstreams ([^`]*)`", MOVED[name]):
        assert 0 == main([*line.split(" --")[0].split(), "--help"])


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        ("record runs/demo --follow", "rlstreams record run runs/demo --follow"),
        ("export runs/demo --out x", "rlstreams export samples runs/demo --out x"),
        ("metrics --follow runs/demo", "rlstreams metrics rows --follow runs/demo"),
        ("replay recordings/demo", "rlstreams replay run recordings/demo"),
    ],
)
def test_a_command_that_got_actions_says_which_one_was_meant(words, meant, capsys):
    """The line as it was typed, with the action in it."""
    assert 2 == main(words.split())
    assert f": `{meant}`?\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["up", "x.toml", "--steps", "-3"], "'--steps': -3 is not in the range x>=1."),
        (["inspect", "x", "--limit", "0"], "'--limit': 0 is not in the range x>=1."),
        (["try", "--rows", "x"], "'--rows': 'x' is not a valid whole number."),
        (["export", "samples", "x", "--min-reward", "nan"], "'nan' is not a finite number."),
        (["broker", "start", "--port", "65536"], "65536 is not in the range 0<=x<=65535."),
    ],
)
def test_a_number_that_makes_no_sense_is_refused(words, told, capsys):
    assert 2 == main(words)
    assert told in capsys.readouterr().err


def test_version(capsys):
    """With the commit, for a bug report."""
    assert 0 == main(["--version"])
    assert f"(commit {commit()})" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["schemas", "streams", "workers"])
def test_a_module_has_one_name(name):
    """Under a second one there would be two of every class; the top folder says the right name."""
    code = f"import {name}"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert 1 == done.returncode
    assert f"ImportError: import rlstreams.{name}, not {name}" in done.stderr


@pytest.fixture(autouse=True)
def fresh_logger():
    """The handler writes to the stderr of its day, so each test gets a new one."""
    logger = logging.getLogger("rlstreams")
    before, logger.handlers = logger.handlers, []
    yield
    logger.handlers = before


def test_log_lines_are_json(capsys, monkeypatch):
    """One object a line with what was bound and what was given; values of any type."""
    monkeypatch.delenv("RLSTREAMS_LOG", raising=False)
    monkeypatch.setenv("RLSTREAMS_HOST", "learner")
    bound = log.get("trainer", "trainer-0", "i1")
    bound.info("step_finished", step=3, path=Path("x"), text="100 % sure")
    (line,) = capsys.readouterr().err.splitlines()
    event = json.loads(line)
    assert event.pop("at_ms") > 1e12
    expected = {
        "level": "info",
        "event": "step_finished",
        "role": "trainer",
        "worker": "trainer-0",
        "host": "learner",
        "instance": "i1",
        "step": 3,
        "path": "x",
        "text": "100 % sure",
    }
    assert expected == event


def test_log_is_readable_on_a_terminal(capsys, monkeypatch):
    """Worker, event and fields, without braces; fractions with four digits."""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    log.get("trainer", "trainer-0", "i1").error("stopped", reason="fenced", loss=-0.0296898126)
    said = "error   stopped worker=trainer-0 reason=fenced loss=-0.02969\n"
    assert capsys.readouterr().err.endswith(said)


def test_log_level(capsys, monkeypatch):
    """The environment sets it, and a typing error is refused."""
    monkeypatch.setenv("RLSTREAMS_LOG", "warning")
    log.get("trainer", "trainer-0", "i1").info("not_shown")
    assert "" == capsys.readouterr().err
    logging.getLogger("rlstreams").handlers = []
    monkeypatch.setenv("RLSTREAMS_LOG", "loud")
    with pytest.raises(ConfigError, match=r"RLSTREAMS_LOG must be one of .* got 'loud'"):
        log.get("trainer", "trainer-0", "i1")


@pytest.mark.parametrize(
    ("words", "config", "rest"),
    [
        ("inspect --worst reward RUN --limit 3 12", ["RUN", "12"], {"limit": 3, "worst": "reward"}),
        ("up a.toml --steps 3 b.toml", ["a.toml", "b.toml"], {"steps": 3}),
        ("up --web a.toml", ["a.toml"], {"web": 9402}),
        ("up a.toml", ["a.toml"], {"web": None}),
        ("up a.toml --web 0 --no-live b.toml", ["a.toml", "b.toml"], {"web": 0, "no_live": True}),
        ("broker tail --last 2 steps RUN", ["RUN"], {"topic": "steps", "last": 2}),
        ("export samples RUN --out - --step 3", ["RUN"], {"out": "-", "step": 3}),
        ("up a.toml -- --odd.toml", ["a.toml", "--odd.toml"], {}),
        ("up a.toml --run.id=x b.toml --trainer.steps 3", ["a.toml", "b.toml"], {}),
    ],
)
def test_options_may_stand_between_arguments(
    words: str, config: list[str], rest: dict[str, object]
) -> None:
    """Overrides as well."""
    found = parsed(words.split()).params
    assert config == found["config"].names
    assert rest == {name: found[name] for name in rest}
    assert (["--run.id=x", "--trainer.steps", "3"] if "--run" in words else []) == found[
        "config"
    ].overrides


@pytest.mark.parametrize(("word", "meant"), [("train", "up"), ("ui", "web"), ("inspec", "inspect")])
def test_a_word_of_another_program_is_understood(
    word: str, meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert 2 == main([word, "run.toml"])
    assert f"there is no {word}; did you mean {meant}?" in capsys.readouterr().err
