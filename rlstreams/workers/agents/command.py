"""An agent that is a command: one process for each start, ended with all that it started."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from rlstreams.streams.log.errors import ConfigError
from rlstreams.streams.log.secrets import resolve_secret, withheld
from rlstreams.streams.log.text import tail
from rlstreams.streams.process.cause import died
from rlstreams.streams.process.child import GONE_S, Child, Orphaned
from rlstreams.streams.process.priority import COMPUTES
from rlstreams.workers.agents.agent import MAX_DETAIL, Ending, LostAgentError, SamplePlace, Start
from rlstreams.workers.config.agents import AgentSection

TASK_FILE = "task.json"
OUTPUT = "output.log"
_LOOK_S = 0.01
_LINES = 20  # of its output, kept where it failed


class CommandAgent:
    """The port `Agent`.

    Raises:
        ConfigError: from the constructor: there is no such program, or a secret is not there.
    """

    def __init__(self, section: AgentSection, folder: Path) -> None:
        """
        Args:
            folder: for tasks and output of the processes; made anew.
        """
        program, *words = section.command
        # The interpreter that runs us is the one with the packages that its user installed.
        program = sys.executable if program in ("python", "python3") else program
        if shutil.which(program) is None:
            raise ConfigError(
                f"agent.command of agent {section.name!r} begins with {program!r}, and there is no "
                "such program: give its path, or install it where the rollout worker runs"
            )
        self._command = (program, *words)
        self._variables = {
            name: resolve_secret(value, f"agent.env.{name}") for name, value in section.env.items()
        }
        # A value that the configuration names by reference is a secret, and never recorded.
        self._secrets = [v for k, v in self._variables.items() if v and v != section.env[k]]
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        self._folder = folder

    async def taken(self, place: SamplePlace) -> str:
        """See Agent: it is started here."""
        return ""

    async def run(self, start: Start) -> Ending:
        """See Agent."""
        folder = Path(tempfile.mkdtemp(dir=self._folder))
        child: Child | None = None
        try:
            task = folder / TASK_FILE
            task.write_text(json.dumps(start.task), encoding="utf-8")
            variables = {**self._variables, **_variables(start, task)}
            begun = asyncio.ensure_future(
                asyncio.to_thread(_started, self._command, folder / OUTPUT, variables)
            )
            try:
                child = await asyncio.shield(begun)
            except asyncio.CancelledError:
                child = await begun  # it runs, or is about to
                raise
            except OSError as err:  # no room for a process: it comes back
                raise LostAgentError(f"{self._command[0]} cannot be started: {err}") from None
            while (status := child.poll()) is None:  # noqa: ASYNC110  (a process sets no event)
                await asyncio.sleep(_LOOK_S)
            if status == 0:
                return Ending()
            said = "\n".join(tail(folder / OUTPUT, _LINES))
            for secret in (start.key, *self._secrets):
                said = said.replace(secret, "***")
            detail = f"{self._command[0]} {died(status)}" + (f":\n{said}" if said else "")
            return Ending(is_failed=True, detail=detail[-MAX_DETAIL:])
        finally:
            if child is not None and child.poll() is None:
                child.kill()
                await asyncio.shield(asyncio.to_thread(child.wait, GONE_S))
            with contextlib.suppress(OSError):
                shutil.rmtree(folder)

    async def close(self) -> None:
        """Do nothing: no process is kept."""


def _started(command: Sequence[str], output: Path, variables: Mapping[str, str]) -> Child:
    return Child.started(
        command,
        orphaned=Orphaned.DIES,
        log=output,
        environment=variables,
        without=withheld(),
        gives_way=COMPUTES,
    )


def _variables(start: Start, task: Path) -> dict[str, str]:
    """Environment variables by which any client of a model server finds this one."""
    return {
        "OPENAI_BASE_URL": f"{start.url}/v1",
        "OPENAI_API_BASE": f"{start.url}/v1",  # the same for clients of before
        "OPENAI_API_KEY": start.key,
        "ANTHROPIC_BASE_URL": start.url,
        "ANTHROPIC_API_KEY": start.key,
        "RLSTREAMS_TASK": str(task),
        "NO_PROXY": ",".join(filter(None, (os.environ.get("NO_PROXY", ""), "127.0.0.1"))),
    }
