"""One attempt at a sample: the policy's turns, and the environment's answers between them.

The last word is the policy's: an environment's answer that no turn follows is not kept.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from rlstreams.workers.engines.base import FinishReason, GeneratedSegment, Int32s
from rlstreams.workers.sandbox.reward import Judgement


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentSegment:
    """Tokens that no policy sampled."""

    token_ids: Int32s  # [tokens]
    text: str  # as the environment gave it


AnySegment = GeneratedSegment | EnvironmentSegment


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One turn of the policy; each of its segments was sampled by one version."""

    segments: tuple[GeneratedSegment, ...]
    finish_reason: FinishReason
    text: str  # special tokens left out

    @property
    def token_ids(self) -> list[int]:
        """All sampled tokens, the one that ends the turn included."""
        return [token for segment in self.segments for token in segment.token_ids.tolist()]


@dataclass(slots=True, kw_only=True)
class Played:
    """An attempt at a sample, under way or over; without an environment it has one turn."""

    attempt: int = 0
    prompt_ids: Int32s  # [tokens]
    turns: list[Turn] = field(default_factory=list)
    answers: list[EnvironmentSegment] = field(default_factory=list)  # between the turns
    judgement: Judgement | None = None  # the environment's; None: the verifier judges
    environment_s: float = 0.0  # waited for the environment
    sample_s: float = 0.0  # of the whole sample, earlier attempts and the verifier included
    waits_for: str = ""

    @property
    def versions(self) -> set[int]:
        """Policy versions that sampled it."""
        return {s.policy_version for turn in self.turns for s in turn.segments}

    def counts(self, *, in_turns: bool) -> dict[str, float]:
        """Counts for the worker's report; `in_turns`: those of the environment, too."""
        sampled = [segment for turn in self.turns for segment in turn.segments]
        counts: dict[str, float] = {
            "samples": 1,
            "tokens": sum(len(segment.token_ids) for segment in sampled),
            "sample_s": self.sample_s,
        }
        if in_turns:
            counts["turns"] = len(self.turns)
            counts["environment_tokens"] = sum(len(a.token_ids) for a in self.answers)
            counts["environment_s"] = self.environment_s
        return counts

    @property
    def last(self) -> Turn:
        """The last turn, which the verifier judges."""
        return self.turns[-1]

    @property
    def segments(self) -> list[AnySegment]:
        """Segments after the prompt, in order."""
        found: list[AnySegment] = []
        for turn, answer in itertools.zip_longest(self.turns, self.answers):
            found += turn.segments
            if answer is not None:
                found.append(answer)
        return found

    @property
    def transcript(self) -> list[dict[str, str]]:
        """Author and text of each turn, in order."""
        said = []
        for turn, answer in itertools.zip_longest(self.turns, self.answers):
            said.append({"author": "policy", "text": turn.text})
            if answer is not None:
                said.append({"author": "environment", "text": answer.text})
        return said

    @property
    def token_ids(self) -> Int32s:
        """All tokens up to the turn that is next or under way."""
        return np.concatenate([self.prompt_ids, *(s.token_ids for s in self.segments)])


def turn_of(segments: Sequence[GeneratedSegment], text: str) -> Turn:
    """A turn, without segments that have no token; the first stays where none has."""
    kept = [segment for segment in segments if len(segment.token_ids)] or segments[-1:]
    reason = segments[-1].finish_reason
    # An empty segment may be all that says how a resumed turn ended.
    kept = [*kept[:-1], replace(kept[-1], finish_reason=reason)]
    return Turn(segments=tuple(kept), finish_reason=reason, text=text)
