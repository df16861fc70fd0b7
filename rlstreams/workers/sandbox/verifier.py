"""A user's function as a judge: each sample is a call, tried again where it may fare better."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable

from rlstreams.workers.sandbox.environment import Ends, outcome_of
from rlstreams.workers.sandbox.reward import AnswerToJudge, Judgement, RewardError
from rlstreams.workers.sandbox.sandbox import Sandbox
from rlstreams.workers.sandbox.user_code import LostCallError, UserCode, UserCodeError

PAUSE_S = 0.25  # before the second attempt, four times as long before each further one
EXTRA = ("finish_reason", "num_tokens", "token_ids", "transcript")


class UserVerifier:
    """Judges by a function, in at most `code.processes` processes.

    Raises:
        ConfigError, DeadlineError: from the constructor, as `Sandbox`.
    """

    def __init__(
        self, code: UserCode, field: str, *, attempts: int, note: Callable[[str], None]
    ) -> None:
        """
        Args:
            field: of the configuration, that names the function.
            attempts: calls for one sample while the function raises, or others end its process.
        """
        self._attempts = attempts
        self._sandbox = Sandbox(code, field, note)
        self._numbers = itertools.count()
        # A call takes whichever process is free first: it waits here, not at one of them.
        self._room = asyncio.Semaphore(code.processes * self._sandbox.processes[0].room)

    async def __call__(self, sample: AnswerToJudge) -> Judgement:
        """Judge in a child process.

        Raises:
            RewardError: the function raised, hung, died, returned no number, or the system has no
                process for it.
        """
        try:
            return await self._sandbox.within(self._judged(sample))
        except UserCodeError as err:
            raise RewardError(f"verifier {err}") from None

    def close(self) -> None:
        """End the processes; idempotent."""
        self._sandbox.close()

    async def _judged(self, sample: AnswerToJudge) -> Judgement:
        for attempt in range(self._attempts):
            if attempt:
                await asyncio.sleep(PAUSE_S * 4 ** (attempt - 1))
            try:
                return await self._attempt(sample)
            except LostCallError as err:
                error = err
            if self._sandbox.is_closed:
                break
        raise UserCodeError(f"{error}, the last of {attempt + 1} attempts" if attempt else error)

    async def _attempt(self, sample: AnswerToJudge) -> Judgement:
        """
        Raises:
            LostCallError: another attempt may fare better.
        """
        known = {
            "finish_reason": sample.finish_reason,
            "num_tokens": len(sample.token_ids),
            "token_ids": list(sample.token_ids),
            "transcript": [dict(turn) for turn in sample.transcript],
        }
        args = [sample.prompt, sample.completion, sample.answer, dict(sample.metadata)]
        key = str(next(self._numbers))
        async with self._room:
            process = await self._sandbox.place(key)
            try:
                extra = {name: known[name] for name in process.wants}
                reply = await process.call({"args": args, "extra": extra})
            finally:
                process.open.discard(key)
        if reply.get("again"):
            raise LostCallError(reply["error"])
        outcome = outcome_of(reply, process.place)
        assert isinstance(outcome, Ends)
        assert outcome.judgement is not None
        return outcome.judgement
