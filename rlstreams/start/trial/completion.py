"""An answer with what became of it; judging one needs no model, so this imports no torch."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rlstreams.workers.dataset.row import Row
from rlstreams.workers.engines.base import FinishReason
from rlstreams.workers.rollout.episode import Played
from rlstreams.workers.sandbox.reward import Judgement, RewardError, Sample, Verifier


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One answer, and what became of it."""

    text: str  # of the last turn
    before: Sequence[Mapping[str, str]] = ()  # turns before it: author and text
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


def judged(verifier: Verifier, row: Row, prompt: str, played: Played) -> Completion:
    """An answer with its judgement, or with why there is none."""
    started_s = time.monotonic()
    judgement, rejected, last = played.judgement, "", played.last
    try:
        judgement = judgement or verifier.judge(
            Sample(
                prompt,
                last.text,
                row.answer,
                json.loads(row.metadata),
                last.finish_reason,
                last.token_ids,
                played.transcript,
            )
        )
    except RewardError as err:
        rejected = str(err)
    return Completion(
        text=last.text,
        before=played.transcript[:-1],
        finish_reason=last.finish_reason,
        judgement=judgement,
        rejected=rejected,
        judge_s=time.monotonic() - started_s,
    )
