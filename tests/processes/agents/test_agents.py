"""Agents as processes: what they are given, how they end, and that nothing of them stays."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlstreams.streams.log.errors import ConfigError
from rlstreams.workers.agents.agent import Agent, Ending, LostAgentError, Start
from rlstreams.workers.agents.command import CommandAgent
from rlstreams.workers.agents.python_agent import PythonAgent
from rlstreams.workers.config.agents import AgentSection

START = Start(
    session_id="7/1", task={"prompt": "1+1="}, url="http://127.0.0.1:1", key="rls-the-secret-key"
)
DEADLINE_S = 60.0


def command(folder: Path, code: str, **section: Any) -> CommandAgent:
    (folder / "agent.py").write_text(code)
    words = ("python", str(folder / "agent.py"))
    return CommandAgent(AgentSection(**{"command": words, **section}), folder / "runs")


def run(agent: Agent) -> Ending:
    return asyncio.run(asyncio.wait_for(agent.run(START), DEADLINE_S))


def test_a_command_is_given_the_gateway_and_its_task(tmp_path: Path) -> None:
    said = tmp_path / "said.json"
    agent = command(
        tmp_path,
        f"import json, os\ntask = json.load(open(os.environ['RLSTREAMS_TASK']))\n"
        f"json.dump([task, dict(os.environ)], open({str(said)!r}, 'w'))",
        env={"EXTRA": "7"},
    )
    assert run(agent) == Ending()
    task, variables = json.loads(said.read_text())
    assert task == {"prompt": "1+1="}
    wanted = {
        "OPENAI_BASE_URL": "http://127.0.0.1:1/v1",
        "OPENAI_API_KEY": START.key,
        "ANTHROPIC_BASE_URL": "http://127.0.0.1:1",
        "ANTHROPIC_API_KEY": START.key,
        "EXTRA": "7",
    }
    assert wanted.items() <= variables.items()
    assert list((tmp_path / "runs").iterdir()) == []


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("import os, sys; print(os.environ['OPENAI_API_KEY']); sys.exit(3)", "exit 3"),
        ("import os; os.kill(os.getpid(), 9)", "SIGKILL"),
        ("raise ValueError('no such tool')", "no such tool"),
    ],
)
def test_a_command_that_fails_says_how_and_keeps_its_key_to_itself(
    tmp_path: Path, code: str, told: str
) -> None:
    ending = run(command(tmp_path, code))
    assert ending.is_failed
    assert told in ending.detail
    assert START.key not in ending.detail


def test_secrets_of_its_configuration_are_masked_in_what_it_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SEARCH", "the-search-secret")
    code = "import os, sys; print(os.environ['KEY'], os.environ['PLACE']); sys.exit(1)"
    ending = run(command(tmp_path, code, env={"KEY": "env:SEARCH", "PLACE": "here"}))
    assert "*** here" in ending.detail
    assert "the-search-secret" not in ending.detail


def test_a_command_that_forks_and_leaves_has_ended_and_nothing_of_it_stays(tmp_path: Path) -> None:
    """Its status is its own; what it left behind is ended, and makes no more calls."""
    pid = tmp_path / "pid"
    code = (
        "import os, time\n"
        "if os.fork() == 0:\n"
        f"    os.setsid(); open({str(pid)!r}, 'w').write(str(os.getpid())); time.sleep(3600)\n"
        f"while not os.path.exists({str(pid)!r}) or not open({str(pid)!r}).read():\n"
        "    time.sleep(0.01)\n"
    )
    assert Ending() == run(command(tmp_path, code))
    _until(lambda: not _is_there(int(pid.read_text())))


def test_a_command_that_is_not_there_is_named_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="begins with 'no-such-program'"):
        CommandAgent(AgentSection(command=("no-such-program",)), tmp_path / "runs")


def test_a_command_that_is_ended_takes_along_what_it_started(tmp_path: Path) -> None:
    """Also what has a session of its own."""
    pids = tmp_path / "pids"
    agent = command(
        tmp_path,
        "import os, subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(3600)'],"
        " start_new_session=True)\n"
        f"open({str(pids)!r}, 'w').write(f'{{os.getpid()}} {{child.pid}}\\n')\n"
        "time.sleep(3600)",
    )

    async def ended() -> None:
        task = asyncio.ensure_future(agent.run(START))
        async with asyncio.timeout(DEADLINE_S):
            while not (pids.exists() and pids.read_text().endswith("\n")):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.wait({task})
        assert task.cancelled()

    asyncio.run(ended())
    numbers = [int(text) for text in pids.read_text().split()]
    assert len(numbers) == 2
    _until(lambda: not any(_is_there(number) for number in numbers))
    assert list((tmp_path / "runs").iterdir()) == []


def _is_there(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def _until(reached: Callable[[], bool]) -> None:
    until_s = time.monotonic() + DEADLINE_S
    while not reached():
        assert time.monotonic() < until_s, "not reached in time"
        time.sleep(0.01)


PYTHON = """
import asyncio, os, signal
from beside import number

async def solve(task, client, *, how="number"):
    await asyncio.sleep(0)
    how = task.get("how", how)
    if how == "key":
        raise RuntimeError(f"{client.api_key} at {client.base_url}")
    if how == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    return {"number": number, "parts": {"reward": 0.5, "half": 1.0}, "nothing": None}[how]
"""


def python(folder: Path, **options: Any) -> PythonAgent:
    pytest.importorskip("openai")
    (folder / "solver.py").write_text(PYTHON)
    (folder / "beside.py").write_text("number = 0.25")
    section = AgentSection(python=f"{folder / 'solver.py'}:solve", options=options, processes=1)
    return PythonAgent(section, 4, lambda _: None)


def of_python(agent: PythonAgent, *tasks: Mapping[str, Any]) -> list[Ending]:
    """Its ends with these tasks, one after another, in one process: each imports `openai`."""

    async def all_of_them() -> list[Ending]:
        try:
            starts = [replace(START, task=task) for task in tasks] or [START]
            return [await asyncio.wait_for(agent.run(one), DEADLINE_S) for one in starts]
        finally:
            await agent.close()

    return asyncio.run(all_of_them())


def test_what_a_function_returns_is_its_reward_or_nothing(tmp_path: Path) -> None:
    number, parts, nothing = of_python(python(tmp_path), {}, {"how": "parts"}, {"how": "nothing"})
    assert number.report is not None
    assert (number.report.reward, dict(number.report.parts)) == (0.25, {})
    assert parts.report is not None
    assert (parts.report.reward, dict(parts.report.parts)) == (0.5, {"half": 1.0})
    assert nothing == Ending()


def test_a_function_that_raises_is_the_agents_failure(tmp_path: Path) -> None:
    """Its message names the file; the client had the session's address and key."""
    (ending,) = of_python(python(tmp_path, how="key"))
    assert ending.is_failed
    assert "*** at http://127.0.0.1:1/v1/" in ending.detail
    assert "solver.py:9: " in ending.detail
    assert START.key not in ending.detail


def test_a_function_whose_process_dies_alone_is_blamed(tmp_path: Path) -> None:
    (ending,) = of_python(python(tmp_path, how="dies"))
    assert ending.is_failed
    assert signal.SIGKILL.name in ending.detail


def test_a_function_whose_process_dies_beside_another_is_lost(tmp_path: Path) -> None:
    """Nobody can say whose fault it is: it is started again."""
    agent = python(tmp_path, how="dies")

    async def both() -> list[object]:
        try:
            starts = [agent.run(START), agent.run(START)]
            return await asyncio.gather(*starts, return_exceptions=True)
        finally:
            await agent.close()

    assert LostAgentError in {type(one) for one in asyncio.run(both())}


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("import no_such_module\n", r"solver\.py:1: ModuleNotFoundError.*; install it into"),
        ("async def solved(task, client): ...\n", r"solver\.py has no function 'solve'.*solved"),
    ],
)
def test_a_file_that_cannot_be_loaded_is_an_error_before_anything_starts(
    tmp_path: Path, text: str, told: str
) -> None:
    pytest.importorskip("openai")
    (tmp_path / "solver.py").write_text(text)
    section = AgentSection(python=f"{tmp_path / 'solver.py'}:solve", processes=1)
    with pytest.raises(ConfigError, match=told):
        PythonAgent(section, 4, lambda _: None)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    pytest.importorskip("openai")
    section = AgentSection(python=f"{tmp_path / 'none.py'}:solve")
    with pytest.raises(ConfigError, match=r"there is no file .*none\.py"):
        PythonAgent(section, 4, lambda _: None)
