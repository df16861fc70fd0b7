"""One sample made ready to be shown: its lineage, stages, tokens, and their words."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rlstreams.debug.inspect.stages import Stage, stages, staleness
from rlstreams.debug.inspect.words import NUMBERS, Spelling, words
from rlstreams.schemas.events import NO_VERSION, TensorError
from rlstreams.streams.lineage.fold import Lineage
from rlstreams.streams.lineage.tokens import TokenTable, mismatch, token_table

_WORTH_TELLING = 1e-3  # nats
_LEAST = 1e-30  # equal numbers are no difference


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleDetail:
    """All that is shown of one sample."""

    lineage: Lineage
    stages: tuple[Stage, ...]  # by time
    tokens: TokenTable | None = None  # None: not sampled yet, or its tensors cannot be read
    words: tuple[str, ...] = ()  # one per token
    mismatch: float = float("nan")  # largest under one version, nats
    problem: str = ""  # why there are no tokens, or no words

    @property
    def versions(self) -> tuple[int, ...]:
        """That sampled its tokens, in the order of their first token."""
        if self.tokens is None:
            return ()
        found = dict.fromkeys(self.tokens.version_N.tolist())
        return tuple(version for version in found if version != NO_VERSION)

    @property
    def staleness(self) -> tuple[int, ...]:
        """Of its policy segments, in versions; empty for what no step used."""
        return tuple(staleness(self.lineage).values())

    @property
    def note(self) -> str:
        """A sentence about what the log does not have of it; empty if nothing is missing."""
        missing = self.lineage.missing
        return f"not in this log, removed or not recorded: {', '.join(missing)}" if missing else ""

    @property
    def num_sampled(self) -> int:
        """Tokens that a policy sampled."""
        return 0 if self.tokens is None else int(self.tokens.is_policy_N.sum())

    def said_by(self, author: str) -> str:
        """The text of all segments of one author."""
        if self.tokens is None:
            return ""
        authors = self.tokens.authors
        pairs = zip(self.words, self.tokens.segment_N.tolist(), strict=True)
        return "".join(word for word, number in pairs if authors[number] == author)

    def worst_tokens(self, num: int) -> list[int]:
        """Where proximal and behavior log-prob differ most, the largest first; at most `num`.

        One at least, where there is any; others only from a thousandth of a nat on.
        """
        if self.tokens is None:
            return []
        distance_N = np.nan_to_num(np.abs(self.tokens.difference_N), nan=-1.0)
        order = np.argsort(-distance_N, kind="stable")[:num]
        floor = min(_WORTH_TELLING, float(distance_N[order[0]])) if order.size else 0.0
        return [int(at) for at in order if distance_N[at] >= max(floor, _LEAST)]


def sample_detail(lineage: Lineage, spelling: Spelling) -> SampleDetail:
    """Everything computed that is shown; what cannot be is named in `problem`."""
    told = tuple(stages(lineage))
    rollout = lineage.rollout
    if rollout is None:
        return SampleDetail(lineage=lineage, stages=told)
    scored = lineage.scored.event if lineage.scored is not None else None
    try:
        tokens = token_table(rollout, scored)
        worst = mismatch(scored) if scored is not None else float("nan")
    except TensorError as err:
        return SampleDetail(
            lineage=lineage, stages=told, problem=f"its tokens cannot be read: {err}"
        )
    prompt = lineage.prompt.event if lineage.prompt is not None else None
    is_other = bool(spelling.hash) and prompt and prompt.tokenizer_hash != spelling.hash
    return SampleDetail(
        lineage=lineage,
        stages=told,
        tokens=tokens,
        words=tuple(words(tokens.ids_N.tolist(), NUMBERS if is_other else spelling)),
        mismatch=worst,
        problem="tokens are numbers: the run had another tokenizer" if is_other else "",
    )
