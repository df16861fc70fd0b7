"""User code that evaluates what the policy wrote: as a verifier and as an environment."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from rlstreams.workers.config.reward import RewardSection
from rlstreams.workers.rollout.verifiers import make_verifier
from rlstreams.workers.sandbox import environment
from rlstreams.workers.sandbox.environment import Ends, PolicyTurn, UserEnvironment
from rlstreams.workers.sandbox.reward import AnswerToJudge, Judgement, RewardError
from rlstreams.workers.sandbox.user_code import UserCode, UserCodeError
from tests import factories

ERRORS = (RewardError, UserCodeError)
DEADLINE_S = 120.0
LINE = 13  # of the text that is evaluated
_HEAD = """\
import asyncio, inspect, os, subprocess, sys, time

here = []

async def meet(count):
    here.append(asyncio.Event())
    [event.set() for event in here] if len(here) == count else await here[-1].wait()
    return 1.0

class Base:
    def __init__(self, prompt, answer, metadata): pass
"""
_RETURN = "return await value if inspect.isawaitable(value) else value"
SOURCES = {
    "function": "def code(prompt, completion, answer, metadata):\n    return eval(completion)",
    "async function": "async def code(prompt, completion, answer, metadata):\n"
    f"    value = eval(completion); {_RETURN}",
    "class": "class code(Base):\n    def step(self, completion): return eval(completion)",
    "async class": "class code(Base):\n"
    f"    async def step(self, completion): value = eval(completion); {_RETURN}",
}


class Either:
    """User code of one kind in its processes.

    Args:
        source: of the object `code`; one of `SOURCES` by its name, or a text.
    """

    def __init__(self, folder: Path, kind: str, source: str = "", **changes: Any) -> None:
        self.is_class = kind.endswith("class")
        self.file = folder / "user.py"
        if source != "-":
            self.file.write_text(source or _HEAD + SOURCES[kind])
        values = {"timeout_s": 60.0, "processes": 1, "concurrency": 16, "memory_mb": 300}
        values |= changes
        self.notes: list[str] = []
        if self.is_class:
            code = UserCode(
                name="code", kind="class", file=str(self.file), extra=environment.EXTRA, **values
            )
            self._environment = UserEnvironment(code, note=self.notes.append)
            self.close = self._environment.close
        else:
            section = RewardSection(verifier=f"{self.file}:code", attempts=1, **values)
            self._verifier = make_verifier(section, self.notes.append)
            self.close = self._verifier.close

    def ask(self, text: str) -> Judgement:
        """What it gives to one sample."""
        (found,) = self.ask_all([text])
        if isinstance(found, BaseException):
            raise found
        return found

    def ask_all(self, texts: Sequence[str]) -> list[Judgement | BaseException]:
        """What it gives to samples side by side."""

        async def all_of_them() -> list[Judgement | BaseException]:
            return await asyncio.gather(*map(self._asked, texts), return_exceptions=True)

        return asyncio.run(asyncio.wait_for(all_of_them(), DEADLINE_S))

    async def _asked(self, text: str) -> Judgement:
        if not self.is_class:
            return await self._verifier.verify(AnswerToJudge("?", text, "", {}))
        episode = self._environment.begin("0/0/0", factories.prompt(metadata="{}"))
        try:
            ends = await episode.step(
                PolicyTurn(number=1, is_last=False, text=text, raw=text, token_ids=[5])
            )
        finally:
            episode.leave()
        assert isinstance(ends, Ends)
        assert ends.judgement is not None
        return ends.judgement

    def __enter__(self) -> Either:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
