"""Held-out accuracy by policy version, and first and newest answers to the same problems."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import starmap

from rlstreams.schemas.events import EVALUATE, Event, Segment, Trajectory
from rlstreams.streams.log.group_ids import evaluation_id
from rlstreams.streams.samples.fold import Samples
from rlstreams.streams.samples.life import EvalCounts

ROWS = 8  # held-out rows whose answers are kept


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationPoint:
    """One evaluation: the held-out rows as they were answered when `policy_version` was newest."""

    policy_version: int
    accuracy: float  # mean reward over the samples so far; 0 without any
    best: float  # mean over rows of the best answer's reward; with one answer a row the accuracy
    num_rows: int  # rows with an answer
    num_samples: int
    num_issued: int
    num_dead: int
    num_tokens: int  # sampled ones
    finished_at_ms: int  # of the newest sample
    is_right_or_wrong: bool = True  # every reward was 0 or 1, so that their mean is an accuracy

    @property
    def is_complete(self) -> bool:
        """Whether every issued sample was answered or is dead."""
        return 0 < self.num_issued <= self.num_samples + self.num_dead


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationState:
    """All evaluations, by version."""

    points: tuple[EvaluationPoint, ...] = ()

    @property
    def curve(self) -> tuple[EvaluationPoint, ...]:
        """Points that will not change: complete ones, and those followed by a later one."""
        return tuple(
            point
            for index, point in enumerate(self.points)
            if point.num_samples and (point.is_complete or index + 1 < len(self.points))
        )

    @property
    def measure(self) -> str:
        """Name of the mean reward of held-out rows: `accuracy` where all rewards are 0 or 1."""
        is_accuracy = all(point.is_right_or_wrong for point in self.points)
        return "accuracy" if is_accuracy else "reward"

    @property
    def first(self) -> EvaluationPoint | None:
        """The run's first evaluation."""
        return self.curve[0] if self.curve else None

    @property
    def last(self) -> EvaluationPoint | None:
        """The run's newest evaluation of the curve."""
        return self.curve[-1] if self.curve else None


def evaluation(samples: Samples) -> EvaluationState:
    """Return a snapshot of the evaluations, oldest version first."""
    return EvaluationState(points=tuple(starmap(_point, sorted(samples.evaluations.items()))))


def _point(version: int, tally: EvalCounts) -> EvaluationPoint:
    accuracy = tally.reward / tally.num_answered if tally.num_answered else 0.0
    return EvaluationPoint(
        policy_version=version,
        accuracy=accuracy,
        best=sum(tally.best.values()) / len(tally.best) if tally.best else accuracy,
        num_rows=len(tally.best) or tally.num_answered,
        num_samples=tally.num_answered,
        num_issued=tally.num_issued,
        num_dead=tally.num_dead,
        num_tokens=tally.tokens,
        finished_at_ms=tally.finished_at_ms,
        is_right_or_wrong=tally.is_right_or_wrong,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRun:
    """Contiguous tokens under one policy version."""

    token_ids: tuple[int, ...]
    policy_version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOutAnswer:
    """One answer to a held-out problem."""

    policy_version: int  # of the evaluation; `runs` has the version of each token
    prompt_ids: tuple[int, ...]
    runs: tuple[TokenRun, ...]
    reward: float
    finish_reason: str

    @property
    def is_right(self) -> bool:
        """Whether it earned at least half of the full reward of 1."""
        return self.reward >= 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A held-out row: its answer under the first version that answered it, and under the newest."""

    row: int
    then: HeldOutAnswer
    now: HeldOutAnswer


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplesState:
    """The problems that are kept, by row."""

    problems: tuple[Problem, ...] = ()


class AnswersView:
    """Keeps sample 0 of the held-out rows below `ROWS`, where its tokens can be read.

    It gets first records alone: `Samples` removes copies.
    An answer with invalid tokens is a foreign writer's: it cannot be shown, and must not end the
    process that watches the run.
    """

    def __init__(self) -> None:
        self._then: dict[int, HeldOutAnswer] = {}
        self._now: dict[int, HeldOutAnswer] = {}

    def apply(self, event: Event) -> None:
        """Take one event; events other than evaluation trajectories change nothing."""
        if not isinstance(event, Trajectory) or event.purpose != EVALUATE or event.sample != 0:
            return
        identity = evaluation_id(event.group_id)
        if identity is None or identity[1] >= ROWS:
            return
        version, row = identity
        try:
            answer = answer_of(event, version)
        except ValueError:
            return
        if row not in self._then or version < self._then[row].policy_version:
            self._then[row] = answer
        if row not in self._now or version > self._now[row].policy_version:
            self._now[row] = answer

    @property
    def state(self) -> SamplesState:
        """A snapshot."""
        return SamplesState(
            problems=tuple(
                Problem(row=row, then=self._then[row], now=self._now[row])
                for row in sorted(self._then)
            )
        )


def answer_of(event: Trajectory, version: int) -> HeldOutAnswer:
    """Return a sample as an answer to be shown.

    Raises:
        ValueError: an invalid token.
    """
    answered = [segment for segment in event.segments if segment.author != "prompt"]
    return HeldOutAnswer(
        policy_version=version,
        prompt_ids=tuple(
            token
            for segment in event.segments
            if segment.author == "prompt"
            for token in _ids(segment)
        ),
        runs=tuple(
            TokenRun(token_ids=_ids(segment), policy_version=segment.policy_version)
            for segment in answered
        ),
        reward=event.reward,
        finish_reason=answered[-1].finish_reason if answered else "",
    )


def _ids(segment: Segment) -> tuple[int, ...]:
    """Return a copy of the ids: a decoded tensor is a view that would keep its whole record alive.

    Raises:
        ValueError: numbers that are no ids; a tokenizer might spell them, or crash on them.
    """
    ids = segment.token_ids.numpy()
    if ids.ndim != 1 or ids.dtype.kind not in "iu" or (len(ids) and ids.min() < 0):
        raise ValueError(f"token_ids must be ids [tokens], got {ids.dtype} {ids.shape}")
    return tuple(int(token) for token in ids)
