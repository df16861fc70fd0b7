"""The console script: quick help, overrides, errors in one line, and packages that are ours."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from rlstreams.__main__ import main, options_last, parser_of_all, split_overrides
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
    with pytest.raises(SystemExit) as raised:
        main(words)
    assert 2 == raised.value.code
    assert "usage: rlstreams" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "usage", "told"),
    [
        (["adit"], "rlstreams", "argument COMMAND: there is no adit; did you mean audit?"),
        (["audit", "--jsn"], "rlstreams audit", "there is no option --jsn; did you mean --json?"),
        (["up", "--step=3"], "rlstreams up", "there is no option --step; did you mean --steps?"),
        (["config", "shw"], "rlstreams config", "there is no shw; did you mean show?"),
        (["diff", "a", "b", "c"], "rlstreams diff", "c is an unexpected argument"),
        (["inspect", "--worst", "x"], "rlstreams inspect", "x; it is one of mismatch, reward, s"),
    ],
)
def test_a_word_that_is_not_known_is_answered_with_what_was_meant(words, usage, told, capsys):
    """Under the usage of the command that was asked, not of the whole program."""
    with pytest.raises(SystemExit) as raised:
        main(words)
    assert 2 == raised.value.code
    said = capsys.readouterr().err
    assert said.startswith(f"usage: {usage} ")
    assert told in said


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["chaos", "x.toml", "--every", "-1"], "--every: must be 0 or above, got -1"),
        (["chaos", "x.toml", "--kills", "0"], "--kills: must be 1 or above, got 0"),
        (["chaos", "x.toml", "--steps", "0"], "--steps: must be 1 or above, got 0"),
        (["chaos", "x.toml", "--max-stop", "inf"], "--max-stop: must be a number, got 'inf'"),
        (["up", "x.toml", "--steps", "-3"], "--steps: must be 1 or above, got -3"),
        (["inspect", "x", "--limit", "0"], "--limit: must be 1 or above, got 0"),
        (["try", "--rows", "x"], "--rows: must be a whole number, got 'x'"),
        (["export", "x", "--min-reward", "nan"], "--min-reward: must be a number, got 'nan'"),
    ],
)
def test_a_number_that_makes_no_sense_is_refused(words, told, capsys):
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert (2, True) == (ended.value.code, told in capsys.readouterr().err)


def test_version(capsys):
    """With the commit, for a bug report."""
    with pytest.raises(SystemExit) as raised:
        main(["--version"])
    assert 0 == raised.value.code
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
    """Worker, event and fields, without braces."""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    log.get("trainer", "trainer-0", "i1").error("stopped", reason="fenced")
    assert capsys.readouterr().err.endswith("error   stopped worker=trainer-0 reason=fenced\n")


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
        ("up a.toml --web 0 --no-live b.toml", ["a.toml", "b.toml"], {"web": 0, "no_live": True}),
        ("topics tail --last 2 steps RUN", ["RUN"], {"topic": "steps", "last": 2}),
        ("export RUN --out - --step 3", ["RUN"], {"out": "-", "step": 3}),
        ("up a.toml -- --odd.toml", ["a.toml", "--odd.toml"], {}),
    ],
)
def test_options_may_stand_between_arguments(
    words: str, config: list[str], rest: dict[str, object]
) -> None:
    parser = parser_of_all()
    args = parser.parse_args(options_last(parser, words.split()))
    assert config == args.config
    assert rest == {name: getattr(args, name) for name in rest}


@pytest.mark.parametrize(("word", "meant"), [("train", "up"), ("ui", "web"), ("inspec", "inspect")])
def test_a_word_of_another_program_is_understood(
    word: str, meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main([word, "run.toml"])
    assert f"there is no {word}; did you mean {meant}?" in capsys.readouterr().err
