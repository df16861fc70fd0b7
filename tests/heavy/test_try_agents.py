"""`try` of agents: each one's sessions word by word, without a broker; one that fails says why."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rlstreams.__main__ import main

EXAMPLES = Path(__file__).parents[2] / "infra/examples/agent"
SOLVER = """
import json, os, re, urllib.request

task = json.load(open(os.environ["RLSTREAMS_TASK"]))


def post(path, body):
    return json.load(urllib.request.urlopen(urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + path, data=json.dumps(body).encode(),
        headers={"authorization": "Bearer " + os.environ["OPENAI_API_KEY"],
                 "content-type": "application/json"}), timeout=60))


messages = [{"role": "user", "content": task["prompt"]}]
for number in range(2):
    answer = post("/chat/completions", {"model": "policy", "messages": messages})
    said = answer["choices"][0]["message"]["content"]
    messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "2+2+2="}]
post("/outcome", {"reward": 0.25, "parts": {"asked": 2.0}, "note": "as well as it could"})
"""
BROKEN = """
print("I begin")
raise RuntimeError("there is no calculator")
"""
CONFIG = """
extends = "example:demo.toml"

[[agent]]
name = "solver"
command = ["python", "solver.py"]

[[agent]]
name = "broken"
command = ["python", "broken.py"]

[reward]
verifier = "agent"
"""


def test_each_agent_is_tried(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = {"solver.py": SOLVER, "broken.py": BROKEN, "run.toml": CONFIG}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert 1 == main(["try", str(tmp_path / "run.toml"), "--rows", "1", "--samples", "2"])
    told = capsys.readouterr().out
    solver, _, broken = told.partition("row 1 of 1")[2].partition("row 1 of 1")
    assert 2 == solver.count("of agent solver: ended after")
    assert 4 == solver.count("assistant: ")
    assert "    user: 2+2+2=" in solver  # what is new since the call before, alone
    assert 2 == solver.count("  reward 0.25  asked 2  'as well as it could'")
    assert 2 == broken.count("of agent broken: agent after")
    assert "RuntimeError: there is no calculator" in broken
    assert "I begin" in broken
    assert "SET ASIDE: agent:" in broken
    assert "agent solver\n  2 answers, mean reward 0.25" in told
    assert "2 of 2 answers would be dead-lettered" in told


def test_a_remote_agent_is_not_waited_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nobody would come."""
    (tmp_path / "run.toml").write_text(
        CONFIG.replace('command = ["python", "solver.py"]', "remote = true")
    )
    assert 78 == main(["try", str(tmp_path / "run.toml"), "--rows", "1"])
    assert "agent 'solver' runs elsewhere, so `try` cannot start it" in capsys.readouterr().err


def test_an_agent_by_a_library_is_tried(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The example, with the library as it comes; each call continues the one before."""
    pytest.importorskip("agents", reason="openai-agents is not installed")
    text = (
        CONFIG.partition("[[agent]]")[0]
        + f'''
[[agent]]
name = "library"
python = "{EXAMPLES / "openai_agents.py"}:solve"
options = {{ tries = 2 }}

[reward]
verifier = "agent"
'''
    )
    (tmp_path / "run.toml").write_text(text)
    assert 0 == main(["try", str(tmp_path / "run.toml"), "--rows", "3", "--samples", "2"])
    told = capsys.readouterr().out
    assert 6 == told.count("of agent library: ended after")
    again = re.findall(r" 2 calls, 0 answered.*\n +\* #0 +(\d+) tokens.*\+ (\d+),", told)
    continued = re.findall(r"\* #1 +(\d+) tokens \((\d+) new\)", told)
    assert again
    assert [int(a) + int(b) for a, b in again] == [int(a) - int(b) for a, b in continued]


@pytest.mark.filterwarnings("ignore")  # it brings other versions of what we use
def test_an_environment_of_verifiers_is_tried(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The example: a task with its reward, rolled out by the library's own loop."""
    pytest.importorskip("verifiers.v1", reason="verifiers is not installed")
    (tmp_path / "run.toml").write_text(
        CONFIG.partition("[[agent]]")[0]
        + f'''
[[agent]]
name = "environment"
command = ["python", "{EXAMPLES / "verifiers_env.py"}"]

[reward]
verifier = "agent"
'''
    )
    assert 0 == main(["try", str(tmp_path / "run.toml"), "--rows", "1", "--samples", "2"])
    told = capsys.readouterr().out
    assert 2 == told.count("of agent environment: ended after")
    assert 2 == len(re.findall(r"    agent: reward [01],", told))
