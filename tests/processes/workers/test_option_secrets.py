"""A secret that user code needs is named in the configuration, and known to that code alone."""

from __future__ import annotations

from contextlib import closing
from os import getpid
from pathlib import Path

import pytest

from rlstreams.streams.log.errors import ConfigError
from rlstreams.streams.log.secrets import resolve_secret
from rlstreams.workers.bootstrap.parts import client_options
from rlstreams.workers.config.load import check_secrets, load, load_with_origins, resolved_json
from rlstreams.workers.rollout.turns import make_environment
from rlstreams.workers.rollout.verifiers import make_verifier
from rlstreams.workers.sandbox.environment import Ends
from rlstreams.workers.sandbox.reward import AnswerToJudge, Judgement
from tests.processes.sandbox.games import begin, turn
from tests.unit.roles.stand import EXAMPLE

GRADE = """
def grade(prompt, completion, answer, metadata, *, api_key="", hint=""):
    return float(completion == api_key + hint)
"""
GAME = """
class Game:
    def __init__(self, prompt, answer, metadata, *, token):
        self.token = token

    def step(self, completion):
        return float(completion == self.token)
"""


def command_lines() -> list[str]:
    """Of this process's children, as everybody on the host can read them."""
    children = Path(f"/proc/{getpid()}/task").glob("*/children")
    pids = [pid for file in children for pid in file.read_text().split()]
    lines = [Path(f"/proc/{pid}/cmdline").read_bytes().decode() for pid in pids]
    assert lines
    return lines


@pytest.fixture
def code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of user code; one secret in the environment, one in a file beside it."""
    monkeypatch.setenv("JUDGE_KEY", "sk-123")
    (tmp_path / "hint.txt").write_text("!\n")
    (tmp_path / "grade.py").write_text(GRADE)
    (tmp_path / "game.py").write_text(GAME)
    return tmp_path


def test_a_verifier_is_called_with_what_its_options_name(code: Path) -> None:
    """And the configuration that is recorded holds the names."""
    path = code / "run.toml"
    path.write_text(
        '[reward]\nverifier = "grade.py:grade"\nprocesses = 1\n'
        'options = {api_key = "env:JUDGE_KEY", hint = "file:hint.txt"}\n'
    )
    config = load([EXAMPLE, path])
    assert "sk-123" not in resolved_json(config)
    with make_verifier(config.reward) as verifier:
        assert 1.0 == verifier.judge(AnswerToJudge("1+1=", "sk-123!", "2", {})).reward


async def test_an_environment_is_made_with_what_its_options_name(code: Path) -> None:
    """Its processes are told, nobody else."""
    config = load(
        [EXAMPLE],
        [f"environment.name={code / 'game.py'}:Game", "environment.options.token=env:JUDGE_KEY"],
    )
    assert "sk-123" not in resolved_json(config)
    with closing(make_environment(config)) as made:
        assert not [line for line in command_lines() if "sk-123" in line]
        ends = await begin(made).step(turn("sk-123"))
        assert Ends(Judgement(reward=1.0, parts={})) == ends


@pytest.mark.parametrize(
    "name",
    ["api_key", "openai_api_key", "token", "auth_token", "PASSWORD", "client-secret", "apikey"],
)
def test_a_secret_in_plain_is_refused(name: str) -> None:
    """The resolved configuration goes into the log that all can read."""
    for table in ("reward.options", "environment.options"):
        with pytest.raises(ConfigError, match=f"{name} is a secret: give it as env:NAME"):
            load([EXAMPLE], [f"{table}.{name}=sk-123"])
    part = f'reward.parts=[{{verifier="exact", options={{{name}="sk-123"}}}}]'
    with pytest.raises(ConfigError, match=rf"reward\.parts\[0\]\.options\.{name} is a secret"):
        load([EXAMPLE], ["reward.verifier=sum", part])


@pytest.mark.parametrize(
    ("override", "field"),
    [
        ("reward.options.hint=env:NOT_SET", r"reward\.options\.hint"),
        ("environment.options.hint=env:NOT_SET", r"environment\.options\.hint"),
        (
            'reward.parts=[{verifier="exact", options={hint="env:NOT_SET"}}]',
            r"reward\.parts\[0\]\.options\.hint",
        ),
    ],
)
def test_a_secret_that_is_not_set_is_told_before_a_start(override: str, field: str) -> None:
    more = ["reward.verifier=sum"] if "parts" in override else ["environment.name=game.py:Game"]
    loaded = load_with_origins([EXAMPLE], [*more, override])
    with pytest.raises(ConfigError, match=f"NOT_SET is not set .wanted by {field} ="):
        check_secrets(loaded)


PEEK = """
import os

def peek(prompt, completion, answer, metadata):
    return float(sum(name in os.environ for name in ("BROKER_WORD", "WEIGHTS_WORD", "OWN_WORD")))
"""


def test_user_code_does_not_get_the_passwords_of_the_run(
    code: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its environment was the worker's, with the password of the log in it; its own stay."""
    for name in ("BROKER_WORD", "WEIGHTS_WORD", "OWN_WORD"):
        monkeypatch.setenv(name, "sk-123")
    (code / "peek.py").write_text(PEEK)
    words = [f"reward.verifier={code / 'peek.py'}:peek", "weights.secret=env:WEIGHTS_WORD"]
    words += ["broker.bootstrap=k:9092", "broker.options.sasl.password=env:BROKER_WORD"]
    config = load([EXAMPLE], words)
    assert "sk-123" == client_options(config)["sasl.password"]
    assert "sk-123" == resolve_secret(config.weights.secret, "weights.secret")
    with make_verifier(config.reward) as verifier:
        assert 1.0 == verifier.judge(AnswerToJudge("1+1=", "2", "2", {})).reward
