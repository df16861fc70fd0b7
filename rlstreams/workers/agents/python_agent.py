"""An agent that is an `async def`: many run side by side in a process of the sandbox."""

from __future__ import annotations

import asyncio
import importlib.util
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from rlstreams.streams.log.errors import ConfigError
from rlstreams.workers.agents.agent import MAX_DETAIL, Ending, LostAgentError, SamplePlace, Start
from rlstreams.workers.agents.in_sandbox import SAID_NOTHING
from rlstreams.workers.config.agents import AgentSection
from rlstreams.workers.config.user_code import code_hashes, located, resolved
from rlstreams.workers.gateway.port import Report
from rlstreams.workers.sandbox.environment import Ends, outcome_of
from rlstreams.workers.sandbox.sandbox import Sandbox
from rlstreams.workers.sandbox.user_code import LostCallError, UserCode, UserCodeError

_PROGRAM = Path(__file__).with_name("in_sandbox.py")
_GRACE_S = 10.0  # beyond the session's own limit, which ends it first


@dataclass(frozen=True, slots=True, kw_only=True)
class _Code(UserCode):
    """Our code around the user's; only the user's files may not be edited under a run."""

    inner: Mapping[str, str]  # file or module, and name, of the user's function

    def files(self) -> dict[str, str]:
        """SHA-256 of the user's files."""
        inner = self.inner
        return code_hashes(f"{inner['file'] or inner['module']}:{inner['name']}")


class PythonAgent:
    """The port `Agent`.

    Raises:
        ConfigError: from the constructor: the file cannot be loaded, or `openai` is not installed.
        DeadlineError: the system has no process for it.
    """

    def __init__(
        self, section: AgentSection, concurrency: int, note: Callable[[str], None]
    ) -> None:
        """
        Args:
            concurrency: starts side by side, over all processes.
            note: called with problems beside starts, for the log.
        """
        if importlib.util.find_spec("openai") is None:
            raise ConfigError(
                f"agent.python of agent {section.name!r} needs a package that is not installed: "
                "pip install openai"
            )
        file, module, name = located(section.python) or ("", "", section.python)
        if file and not Path(file).is_file():
            raise ConfigError(f"agent.python: there is no file {file}")
        code = _Code(
            name="run",
            file=str(_PROGRAM),
            title=section.python,
            inner={"file": file, "module": module, "name": name},
            options={"options": dict(resolved(section.options, "agent.options."))},
            timeout_s=section.timeout_s + _GRACE_S,
            memory_mb=section.memory_mb,
            processes=section.processes,
            concurrency=-(-concurrency // section.processes),
        )
        self._sandbox = Sandbox(code, "agent.python", note)

    async def taken(self, place: SamplePlace) -> str:
        """See Agent: it is started here."""
        return ""

    async def run(self, start: Start) -> Ending:
        """See Agent."""
        try:
            reply = await self._sandbox.within(self._called(start))
            outcome = outcome_of(reply, str(self._sandbox.code))
        except LostCallError as err:
            raise LostAgentError(str(err)) from None
        except UserCodeError as err:
            detail = str(err).replace(start.key, "***")
            return Ending(is_failed=True, detail=detail[-MAX_DETAIL:])
        judged = outcome.judgement if isinstance(outcome, Ends) else None
        if judged is None or SAID_NOTHING in judged.parts:
            return Ending()
        return Ending(report=Report(reward=judged.reward, parts=judged.parts, note=judged.note))

    async def _called(self, start: Start) -> dict[str, object]:
        name = f"{start.session_id}#{id(start)}"
        process = await self._sandbox.place(name)
        try:
            args = [json.dumps(start.task), f"{start.url}/v1", start.key, {}]
            return await process.call({"args": args, "extra": {}})
        finally:
            process.open.discard(name)

    async def close(self) -> None:
        """See Agent."""
        await asyncio.to_thread(self._sandbox.close)
