"""Environments, which answer the policy between its turns; one episode per sample.

An episode belongs to one attempt at one sample and begins with the policy's first turn. A user's
class is made once per episode, in a process where it stays; when that ends, or the sample is given
up, the episode is over and a next attempt begins anew from the prompt.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlstreams.schemas.events import Prompt
from rlstreams.workers.sandbox.process import Process
from rlstreams.workers.sandbox.reward import Judgement, check_judgement
from rlstreams.workers.sandbox.sandbox import Sandbox
from rlstreams.workers.sandbox.user_code import LostCallError, UserCode, UserCodeError

Message = Mapping[str, str]  # role and content
EXTRA = ("turn", "is_last", "num_tokens", "token_ids", "raw")


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyTurn:
    """A turn of the policy that it ended by itself."""

    number: int  # from 1
    is_last: bool  # no turn can follow: `max_turns` is reached
    text: str  # special tokens left out
    raw: str  # with them
    token_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class Says:
    """The environment's answer, and the episode goes on."""

    content: str | Sequence[Message]

    @property
    def text(self) -> str:
        """The answer as text, for verifiers and people."""
        if isinstance(self.content, str):
            return self.content
        return "\n".join(message["content"] for message in self.content)


@dataclass(frozen=True, slots=True)
class Ends:
    """The end of an episode."""

    judgement: Judgement | None  # None: the verifier judges


def outcome_of(reply: Mapping[str, Any], place: str) -> Says | Ends:
    """Read the reply of a process of user code.

    Raises:
        UserCodeError: an error; or numbers that cannot be learnt from, or that are none.
    """
    if "error" in reply:
        raise UserCodeError(str(reply["error"]))
    try:
        if "says" in reply:
            return Says(reply["says"])
        ends = reply["ends"]
        if ends is None:
            return Ends(None)
        parts = {str(name): float(value) for name, value in ends["parts"].items()}
        judged = Judgement(
            reward=float(ends["reward"]), parts=parts, note=str(ends.get("note", ""))
        )
        check_judgement(judged)
    except (KeyError, TypeError, AttributeError) as err:
        raise UserCodeError(f"{place} sent {err!r}") from None
    except ValueError as err:
        raise UserCodeError(f"{place}: {err}") from None
    return Ends(judged)


class UserEnvironment:
    """Episodes of a user's class.

    Raises:
        ConfigError, DeadlineError: from the constructor, as `Sandbox`.
    """

    def __init__(
        self, code: UserCode, *, must_reward: bool = False, note: Callable[[str], None]
    ) -> None:
        """
        Args:
            must_reward: None ends no episode: there is no verifier to judge it.
            note: called with problems beside samples, or after they were over, for the log.
        """
        self.sandbox = Sandbox(code, "environment.name", note)
        self.must_reward = must_reward
        self._numbers = itertools.count()

    def begin(self, name: str, prompt: Prompt) -> UserEpisode:
        """The episode of an attempt; a sample that comes back is not taken for the one that left.

        Args:
            name: `{group_id}/{sample}/{attempt}`, for messages.
        """
        return UserEpisode(self, f"{name}#{next(self._numbers)}", prompt)

    def close(self) -> None:
        """Close what is open and end child processes; idempotent."""
        self.sandbox.close()


class UserEpisode:
    """One attempt at one sample: one object of the user's class, from the first step on."""

    def __init__(self, environment: UserEnvironment, key: str, prompt: Prompt) -> None:
        self._environment = environment
        self._sandbox = environment.sandbox
        self._key = key
        self._prompt = prompt
        self._process: Process | None = None

    async def step(self, turn: PolicyTurn) -> Says | Ends:
        """Answer a turn of the policy.

        Raises:
            LostCallError: the state was lost with its process; a `SuspectCallError` if this step
                may have been the cause.
            UserCodeError: the environment failed on this sample.
        """
        try:
            return await self._sandbox.within(self._step(turn))
        except UserCodeError as err:
            raise type(err)(f"environment {err}") from None

    def leave(self) -> None:
        """Let go of the state; returns at once, idempotent."""
        if not self._sandbox.is_closed:
            self._sandbox.submit(self._leave())

    async def _step(self, turn: PolicyTurn) -> Says | Ends:
        start = None
        if self._process is None:
            self._process = await self._sandbox.place(self._key)
            prompt = self._prompt
            start = [prompt.text, prompt.answer, json.loads(prompt.metadata or "{}")]
        process = self._process
        known: dict[str, Any] = {
            "turn": turn.number,
            "is_last": turn.is_last,
            "num_tokens": len(turn.token_ids),
            "token_ids": list(turn.token_ids),
            "raw": turn.raw,
        }
        extra = {name: known[name] for name in process.wants}
        request = {"key": self._key, "start": start, "args": [turn.text], "extra": extra}
        outcome = outcome_of(await process.call(request), process.place)
        if outcome == Ends(None) and self._environment.must_reward:
            raise UserCodeError(
                f"{process.place}: step returned None, and reward.verifier is `environment`: "
                "return a number to end, or name a verifier"
            )
        return outcome

    async def _leave(self) -> None:
        """Close the object after its step, which is cancelled if it is asynchronous."""
        process, self._process = self._process, None
        if process is None:
            return
        try:
            if not process.broken:
                # An asynchronous step ends by this, so it is not waited for; a plain one is.
                request = {"close": [self._key]}
                reply = await process.call(request, needs_room=not process.is_async)
                outcome_of({"ends": None, **reply}, process.place)
        except LostCallError:
            pass  # its object is gone, and the process's end is reported elsewhere
        except UserCodeError as err:
            self._sandbox.note(f"closing {self._key}: environment {err}")
        finally:
            process.open.discard(self._key)
