"""The environment port: what answers the policy between its turns, one episode per sample.

An episode belongs to one attempt at one sample and begins with the policy's first turn. It lives in
a process; when that ends, or the sample is given up, the episode is over and a next attempt begins
anew from the prompt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from rlstreams.schemas.events import Prompt
from rlstreams.workers.rollout.reward import Judgement

Message = Mapping[str, str]  # role and content


class EpisodeError(Exception):
    """The environment raised, hung, died or answered nonsense; names the place."""


class LostEpisodeError(EpisodeError):
    """The state is gone by no fault of this sample: another attempt may fare better."""


class SuspectEpisodeError(LostEpisodeError):
    """It is gone, and this sample's step was one of several that may have ended the process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyTurn:
    """What the policy wrote, ended by itself."""

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
        """For verifiers and people."""
        if isinstance(self.content, str):
            return self.content
        return "\n".join(message["content"] for message in self.content)


@dataclass(frozen=True, slots=True)
class Ends:
    """The episode is over."""

    judgement: Judgement | None  # None: the verifier judges


class Episode(Protocol):
    """One attempt at one sample."""

    async def step(self, turn: PolicyTurn) -> Says | Ends:
        """Answer a turn of the policy.

        Raises:
            LostEpisodeError: the state was lost with its process; a `SuspectEpisodeError` if this
                step may have been the cause.
            EpisodeError: the environment failed on this sample.
        """

    def leave(self) -> None:
        """Let go of the state; returns at once, idempotent."""


class Environment(Protocol):
    """Makes episodes; its methods run on one event loop, `close` on any thread."""

    def begin(self, name: str, prompt: Prompt) -> Episode:
        """The episode of an attempt.

        Args:
            name: `{group_id}/{sample}/{attempt}`, unique among those under way.
        """

    def close(self) -> None:
        """Close what is open and end child processes; idempotent."""
