"""An answer with what became of it; judging one needs no model, so this imports no torch."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from workers.engines.base import FinishReason
from workers.problems.row import Row
from workers.rollout.reward import Judgement, RewardError, Verifier


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One answer, and what became of it."""

    text: str
    token_ids: Sequence[int] = ()
    finish_reason: str = FinishReason.STOP
    judgement: Judgement | None = None
    rejected: str = ""  # why a run would set the sample aside; empty: it would not
    note: str = ""  # what the reward alone does not say
    judge_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TriedRow:
    """A row with its answers."""

    row: Row
    prompt_ids: Sequence[int]
    left_out: str = ""  # why a run would not issue the row; then there are no answers
    completions: Sequence[Completion] = ()


@dataclass(slots=True)
class Times:
    """Where the time went, seconds."""

    load_s: float = 0.0
    sample_s: float = 0.0
    num_tokens: int = 0
    judge_s: list[float] = field(default_factory=list)


def judged(
    verifier: Verifier,
    row: Row,
    prompt: str,
    text: str,
    finish_reason: str,
    token_ids: Sequence[int] = (),
) -> Completion:
    """An answer with its judgement, or with why there is none."""
    started_s = time.monotonic()
    judgement, rejected = None, ""
    try:
        metadata = json.loads(row.metadata)
        judgement = verifier.judge(prompt, text, row.answer, metadata, finish_reason, token_ids)
    except RewardError as err:
        rejected = str(err)
    return Completion(
        text=text,
        finish_reason=finish_reason,
        judgement=judgement,
        rejected=rejected,
        judge_s=time.monotonic() - started_s,
    )
