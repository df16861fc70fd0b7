"""One sample ready for display: its lineage, stages, tokens, and their words.

Times of stages are those that each process wrote, by its own clock.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from rlstreams.schemas.events import (
    NO_VERSION,
    PolicyLoaded,
    Prompt,
    ScoredTrajectory,
    TensorError,
    Trajectory,
)
from rlstreams.streams.lineage.fold import Lineage, TrainedIn
from rlstreams.streams.log.record import Position, Record
from rlstreams.streams.segments import is_sampled, num_sampled, sampled_segments
from rlstreams.streams.tokens import TokenTable, mismatch, token_table
from rlstreams.words.spelling import NUMBERS, Spelling, words

_HASH = 12  # digits of a weight hash that are shown


@dataclass(frozen=True, slots=True, kw_only=True)
class LifeEvent:
    """One event in the life of a sample, or of the weights that it was sampled with or changed."""

    role: str
    what: str  # a word or two
    detail: str
    at_ms: int
    until_ms: int  # equal to `at_ms` for a stage that takes no time
    position: Position | None = None
    is_own: bool = True  # False: about weights, not about the sample itself


def stages(lineage: Lineage) -> list[LifeEvent]:
    """Return the stages of a sample and of its weights, by time."""
    return sorted(_stages(lineage), key=lambda stage: (stage.at_ms, stage.until_ms))


def _stages(lineage: Lineage) -> Iterator[LifeEvent]:
    if lineage.prompt is not None:
        yield _issued(lineage.prompt)
    for load in lineage.loads.values():
        yield _loaded(load)
    if (rollout := lineage.rollout) is not None:
        own = lineage.trajectory.position if lineage.trajectory is not None else None
        yield _rolled_out(rollout, own)
    if lineage.scored is not None:
        yield _scored(lineage.scored)
    for letter in lineage.letters:
        event = letter.event
        detail = f"{event.worker}: {event.reason}, {event.detail}"
        yield _moment(event.role, "set aside", detail, event.at_ms, letter.position)
    yield from _closed(lineage)


def _closed(lineage: Lineage) -> Iterator[LifeEvent]:
    if (drop := lineage.dropped) is not None:
        after = f"; issued again as group {lineage.replaced_by}" if lineage.replaced_by else ""
        detail = f"{drop.group.reason} {drop.group.detail}".rstrip() + after
        yield _moment("trainer", "dropped", detail, drop.at_ms, drop.position)
    if (trained := lineage.trained) is not None:
        yield _trained(lineage, trained)
        made = trained.step.policy_version
        if (published := lineage.published.get(made)) is not None:
            yield LifeEvent(
                role="trainer",
                what=f"version {made}",
                detail=f"made by step {trained.step.step}: weights "
                f"{published.weight_hash[:_HASH]}, {published.num_bytes / 1e6:,.1f} MB",
                at_ms=published.published_at_ms,
                until_ms=published.published_at_ms,
                is_own=False,
            )
    for load in lineage.used_by:
        yield _loaded(load)


def _moment(role: str, what: str, detail: str, at_ms: int, position: Position) -> LifeEvent:
    return LifeEvent(
        role=role, what=what, detail=detail, at_ms=at_ms, until_ms=at_ms, position=position
    )


def _issued(record: Record[Prompt]) -> LifeEvent:
    event = record.event
    replaces = f"; in place of group {event.replaces}" if event.replaces is not None else ""
    detail = (
        f"row {event.row}, epoch {event.dataset_epoch}, one of {event.group_size}; "
        f"for version {event.min_policy_version} or newer{replaces}"
    )
    return _moment("prompts", "issued", detail, event.issued_at_ms, record.position)


def _loaded(load: PolicyLoaded) -> LifeEvent:
    return LifeEvent(
        role=load.role,
        what=f"version {load.policy_version}",
        detail=f"{load.worker} has it by {load.channel} in {load.seconds:.3f} s, "
        f"paused {load.paused_s:.3f} s",
        at_ms=load.loaded_at_ms - round(load.seconds * 1000),
        until_ms=load.loaded_at_ms,
        is_own=False,
    )


def _rolled_out(event: Trajectory, position: Position | None) -> LifeEvent:
    sampled = sampled_segments(event)
    versions = list(dict.fromkeys(segment.policy_version for segment in sampled))
    ends = ", ".join(dict.fromkeys(s.finish_reason for s in sampled if s.finish_reason))
    ended = f"; {ends}" if ends else ""
    said = [segment for segment in event.segments if segment.author == "environment"]
    tokens = f"{num_sampled(event)} tokens"
    if said:
        others = sum(len(segment.token_ids) for segment in said)
        tokens += f" in {1 + len(said)} turns, {others} by the environment between them"
    again = f", attempt {event.attempt}" if event.attempt else ""
    return LifeEvent(
        role="rollout",
        what="sampled",
        detail=f"{event.worker}{again}: {tokens}, {_versions(versions)}{ended}; "
        f"reward {event.reward:g}",
        at_ms=event.started_at_ms,
        until_ms=event.finished_at_ms,
        position=position,
    )


def _scored(record: Record[ScoredTrajectory]) -> LifeEvent:
    event = record.event
    scores = ", ".join(
        f"segment {score.segment} under {score.policy_version} ({score.anchor})"
        for score in event.scores
    )
    detail = f"{event.worker}: {scores or 'nothing to score'}"
    return _moment("logprob", "scored", detail, event.scored_at_ms, record.position)


def _trained(lineage: Lineage, trained: TrainedIn) -> LifeEvent:
    step, ref = trained.step, trained.ref
    distances = ", ".join(str(n) for n in sorted(set(staleness(lineage).values())))
    masked = f", {len(trained.masked)} segments masked" if trained.masked else ""
    return LifeEvent(
        role="trainer",
        what=f"step {step.step}",
        detail=f"sample {trained.index + 1} of {len(step.samples)}, micro-batch "
        f"{trained.micro_batch + 1}, advantage {ref.advantage:+.3f}, staleness {distances or '-'}"
        f"{masked}",
        at_ms=step.started_at_ms,
        until_ms=step.finished_at_ms,
        position=trained.position,
    )


def staleness(lineage: Lineage) -> dict[int, int]:
    """Return the staleness of each policy segment: the version trained minus the one that sampled.

    Empty for a sample that no step used.
    """
    rollout = lineage.rollout
    if lineage.trained is None or rollout is None:
        return {}
    base = lineage.trained.base_version
    return {
        number: base - segment.policy_version
        for number, segment in enumerate(rollout.segments)
        if is_sampled(segment)
    }


def _versions(versions: list[int]) -> str:
    named = ["no version" if v == NO_VERSION else f"{v}" for v in versions]
    return f"{'version' if len(named) == 1 else 'versions'} {', '.join(named) or '-'}"


_LEAST_SHOWN = 1e-3  # nats
_LEAST = 1e-30  # equal numbers are no difference


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleDetail:
    """Everything that a screen shows of one sample."""

    lineage: Lineage
    stages: tuple[LifeEvent, ...]  # by time
    tokens: TokenTable | None = None  # None: not sampled yet, or its tensors cannot be read
    words: tuple[str, ...] = ()  # one text per token
    mismatch: float = float("nan")  # largest one under one version, nats
    problem: str = ""  # why there are no tokens, or no words

    @property
    def versions(self) -> tuple[int, ...]:
        """Versions that sampled its tokens, in the order of their first token."""
        if self.tokens is None:
            return ()
        found = dict.fromkeys(self.tokens.version_N.tolist())
        return tuple(version for version in found if version != NO_VERSION)

    @property
    def staleness(self) -> tuple[int, ...]:
        """Staleness of its policy segments, in versions; empty for a sample that no step used."""
        return tuple(staleness(self.lineage).values())

    @property
    def note(self) -> str:
        """A sentence that names the sample's records missing in the log; "": none is missing."""
        missing = self.lineage.missing
        return f"not in this log, removed or not recorded: {', '.join(missing)}" if missing else ""

    @property
    def num_sampled(self) -> int:
        """Number of tokens that a policy sampled."""
        return 0 if self.tokens is None else int(self.tokens.is_policy_N.sum())

    def said_by(self, author: str) -> str:
        """Return the text of all segments of one author."""
        if self.tokens is None:
            return ""
        authors = self.tokens.authors
        pairs = zip(self.words, self.tokens.segment_N.tolist(), strict=True)
        return "".join(word for word, number in pairs if authors[number] == author)

    def turns(self) -> list[tuple[str, str]]:
        """Return (author, text) in order; neighbours of one author are one turn."""
        if self.tokens is None:
            return []
        authors = self.tokens.authors
        found: list[tuple[str, str]] = []
        for word, number in zip(self.words, self.tokens.segment_N.tolist(), strict=True):
            author = authors[number]
            before = found.pop()[1] if found and found[-1][0] == author else ""
            found.append((author, before + word))
        return found

    def worst_tokens(self, num: int) -> list[int]:
        """Return the indices of the at most `num` tokens with the largest difference of log-probs.

        The largest difference comes first, however small; others need a thousandth of a nat.
        """
        if self.tokens is None:
            return []
        distance_N = np.nan_to_num(np.abs(self.tokens.difference_N), nan=-1.0)
        order = np.argsort(-distance_N, kind="stable")[:num]
        floor = min(_LEAST_SHOWN, float(distance_N[order[0]])) if order.size else 0.0
        return [int(at) for at in order if distance_N[at] >= max(floor, _LEAST)]


def sample_detail(lineage: Lineage, spelling: Spelling) -> SampleDetail:
    """Compute everything that is shown; `problem` names the part that cannot be computed."""
    found = tuple(stages(lineage))
    rollout = lineage.rollout
    if rollout is None:
        return SampleDetail(lineage=lineage, stages=found)
    scored = lineage.scored.event if lineage.scored is not None else None
    try:
        tokens = token_table(rollout, scored)
        worst = mismatch(scored) if scored is not None else float("nan")
    except TensorError as err:
        return SampleDetail(
            lineage=lineage, stages=found, problem=f"its tokens cannot be read: {err}"
        )
    prompt = lineage.prompt.event if lineage.prompt is not None else None
    is_other = bool(spelling.hash) and prompt and prompt.tokenizer_hash != spelling.hash
    return SampleDetail(
        lineage=lineage,
        stages=found,
        tokens=tokens,
        words=tuple(words(tokens.ids_N.tolist(), NUMBERS if is_other else spelling)),
        mismatch=worst,
        problem="tokens are numbers: the run had another tokenizer" if is_other else "",
    )
