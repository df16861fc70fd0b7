"""Scored trajectories to the arrays of one step.

The ledger has the cut into micro-batches and their order (`cut.py`), so a redo has every array bit
for bit. Axes: `B` sequence, `T` token.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from rlstreams.schemas.events import MaskedSegment, ScoredTrajectory
from rlstreams.streams.log.group_ids import SampleId
from rlstreams.streams.segments import is_sampled, num_tokens
from rlstreams.workers.model.cut import Cut, one_row, rows_of
from rlstreams.workers.model.prefixes import NOTHING_TAKEN, Prefixes, Taken, own_tokens
from rlstreams.workers.model.routes import padded_routes
from rlstreams.workers.trainer.learn.cutting import (
    minibatch_of,
    recorded_routes,
)

Float32s = npt.NDArray[np.float32]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """One forward and backward. Arrays are [B, T] unless noted, padded at the end of T.

    Values of a token stand in the token's own column: its log-probs are given the columns before
    it. Outside of the loss mask they are 0 and temperature is 1.
    """

    token_ids_BT: npt.NDArray[np.int64]
    real_BT: Bools  # False: padding
    loss_mask_BT: Bools  # True: a policy token to learn from
    behavior_logprobs_BT: Float32s  # nats
    proximal_logprobs_BT: Float32s  # nats
    is_true_anchor_BT: Bools  # proximal was scored under the version that sampled the token
    is_scored_BT: Bools  # proximal was scored at all: it is not behavior's stand-in
    is_after_pull_BT: Bools  # sampled under another version than the sample's first token
    temperature_BT: Float32s
    advantages_B: Float32s
    num_batch_loss_tokens: int  # of the whole batch: the loss is a mean over these
    num_batch_learnt: int  # samples of the whole batch that have such tokens
    num_batch_samples: int  # of the whole batch, wholly masked ones included
    # Share of its sample's tokens to learn from that a row has; None: each row is a sample.
    shares_B: npt.NDArray[np.float64] | None = None
    bin_tokens: int = 0  # rows are computed one behind another in a bin of so many; 0: padded
    taken: Sequence[Taken] | None = None  # by row, tokens that are another's in the bin
    reference_logprobs_BT: Float32s | None = None  # nats, NaN: none recorded; None: of no sample
    # A teacher's likeliest tokens, int32, and their log-probs (`distill.py`); None: not asked for.
    top_ids_BTK: npt.NDArray[np.int32] | None = None
    top_logprobs_BTK: Float32s | None = None
    # [B, T, layers with a router, top_k], and a mask of tokens that have them: every forward of
    # these tokens takes these experts, and the live router's for the others. None: live routers
    # alone.
    routed_experts_BTLK: npt.NDArray[Any] | None = None
    is_routed_BT: Bools | None = None
    ages_BT: Float32s | None = None  # staleness, versions
    start_logprobs_BT: Float32s | None = None  # nats, before the step's first update
    factors_BT: Float32s | None = None  # of the importance weights; None: all 1
    # For a critic: advantages by token, values at the step's start, targets of the values.
    advantages_BT: Float32s | None = None
    values_BT: Float32s | None = None
    returns_BT: Float32s | None = None

    @property
    def advantages_N(self) -> Float32s:
        """Advantage of each loss token, row by row; its sample's, or its own with a critic."""
        if self.advantages_BT is not None:
            return self.advantages_BT[self.loss_mask_BT]
        return self.advantages_B[self.loss_mask_BT.nonzero()[0]]

    @property
    def num_computed_tokens(self) -> int:
        """Tokens that pass the model, padding included."""
        return self.bin_tokens or self.token_ids_BT.size

    @property
    def own_BT(self) -> Bools:
        """Mask of real tokens that pass the model: not those that a row takes over."""
        return own_tokens(self.real_BT, self.taken)

    def in_bin(self, values_BT: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """The rows' own values, one row behind another: (1, `bin_tokens`, ...)."""
        return one_row(values_BT, self.own_BT, self.bin_tokens)

    @property
    def num_loss_tokens(self) -> int:
        """Tokens of this micro-batch that are learnt from."""
        return int(self.loss_mask_BT.sum())

    @property
    def shares_R(self) -> npt.NDArray[np.float64] | None:
        """`shares_B` of the rows that have tokens to learn from."""
        return None if self.shares_B is None else self.shares_B[self.loss_mask_BT.any(1)]

    @property
    def loss_tokens_by_row(self) -> list[int]:
        """Number of these tokens by row, of the rows that have any."""
        return [int(num) for num in self.loss_mask_BT.sum(1) if num]


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One optimizer step."""

    micro_batches: tuple[MicroBatch, ...]
    cut: Cut
    num_loss_tokens: int
    staleness: dict[str, int]  # trained tokens by staleness, as `StepCompleted` has them
    anchors: dict[str, int]  # trained tokens by anchor, likewise
    minibatches: tuple[int, ...] = ()  # mini-batch of each micro-batch; (): there is one
    epochs: int = 1  # number of times that each is learnt from

    @property
    def updates(self) -> list[tuple[int, ...]]:
        """Micro-batches of each optimizer step, in order; without those that have no token to
        learn from."""
        if not self.minibatches:
            return [tuple(range(len(self.micro_batches)))] * self.epochs
        members: dict[int, list[int]] = {}
        for index, (number, part) in enumerate(
            zip(self.minibatches, self.micro_batches, strict=True)
        ):
            if part.num_batch_loss_tokens:
                members.setdefault(number, []).append(index)
        return [tuple(members[number]) for number in sorted(members)] * self.epochs

    @property
    def spans(self) -> list[tuple[int, int]]:
        """For each sample its tokens, and how many of them its bin has as another's."""
        return [
            (int(num), taken.tokens)
            for part in self.micro_batches
            for num, taken in zip(
                part.real_BT.sum(1), part.taken or [NOTHING_TAKEN] * len(part.real_BT), strict=True
            )
        ]

    def figures(self) -> dict[str, float]:
        """Numbers of tokens: of the loss, of samples, those that a bin has once for several, and
        those that pass the model, padding included."""
        parts, spans = self.micro_batches, self.spans
        return {
            "num_loss_tokens": float(self.num_loss_tokens),
            "tokens_real": float(sum(num for num, _ in spans)),
            "tokens_shared": float(sum(taken for _, taken in spans)),
            "tokens_computed": float(sum(part.num_computed_tokens for part in parts)),
        }


def pack(
    rows: Sequence[ScoredTrajectory],
    advantages: Float32s,
    masked: Sequence[MaskedSegment],
    *,
    policy_version: int,  # that the step starts from
    cut: Cut,
    replay_routes: bool = False,
    minibatches: int = 1,
    epochs: int = 1,
    left_out: Collection[SampleId] = (),
    prefixes: Prefixes | None = None,
) -> Batch:
    """The batch of a plan. Deterministic; its samples have passed `validate`.

    Args:
        rows: of the samples (`scored_rows`) in batch order, as `advantages`.
        masked: segments that stay out of the loss.
        cut: into micro-batches, as planned (`planned_cut`), or as recorded.
        minibatches: number of optimizer steps; each divides by its own sums.
        left_out: samples that are not learnt from, see `_kept`.
        prefixes: those that the cut was planned with.

    Raises:
        ValueError: lengths or a cut that do not fit, a masked segment of no sample, no token left.
    """
    if len(advantages) != len(rows):
        raise ValueError(f"{len(advantages)} advantages for {len(rows)} samples")
    planned = _trained_segments(rows, masked)
    kept = _kept(rows, planned, left_out)
    counted, tokens = (_policy_tokens(rows, own) for own in (planned, kept))
    if not any(tokens):
        raise ValueError(f"batch of {len(rows)} samples has no token to learn from")
    cut.check(len(rows))
    names = _names(rows)
    of_row = minibatch_of([group_id for group_id, _ in names], minibatches)
    shares = _shares(names, counted)
    sums = _sums(of_row, names, counted, tokens)

    def part(members: Sequence[int], row: tuple[int, Sequence[Taken] | None]) -> MicroBatch:
        return _micro_batch(
            [rows[index] for index in members], advantages[list(members)],
            [kept[index] for index in members], sums[of_row[members[0]]],
            None if shares is None else shares[list(members)], policy_version, replay_routes, *row,
        )  # fmt: skip

    return Batch(
        micro_batches=tuple(map(part, cut.members, rows_of(cut, prefixes))),
        cut=cut,
        num_loss_tokens=sum(tokens),
        minibatches=tuple(of_row[own[0]] for own in cut.members) if minibatches > 1 else (),
        epochs=epochs,
        **_token_counts(rows, kept, policy_version),
    )


def _names(rows: Sequence[ScoredTrajectory]) -> list[SampleId]:
    """Group and number of the sample of each row."""
    return [SampleId.of(s.trajectory) for s in rows]


def _shares(names: Sequence[SampleId], counted: Sequence[int]) -> npt.NDArray[np.float64] | None:
    """Share of its sample's tokens that each row has; None: no sample has several rows."""
    if len(set(names)) == len(names):
        return None
    whole = Counter[SampleId]()
    for name, num in zip(names, counted, strict=True):
        whole[name] += num
    pairs = zip(names, counted, strict=True)
    return np.array([num / max(1, whole[name]) for name, num in pairs])


class _Sums(NamedTuple):
    """Divisors of the losses of one mini-batch."""

    num_tokens: int  # of the loss
    num_learnt: int  # samples that have any
    num_samples: int


def _sums(
    of_row: Sequence[int],
    names: Sequence[SampleId],
    counted: Sequence[int],
    learnt: Sequence[int],
) -> dict[int, _Sums]:
    """The sums of each mini-batch; its tokens and learnt samples are 0 if nothing of it is kept."""
    tokens, own = Counter[int](), defaultdict[int, Counter[SampleId]](Counter)
    for number, name, num in zip(of_row, names, counted, strict=True):
        tokens[number] += num
        own[number][name] += num
    found = {n: _Sums(tokens[n], sum(map(bool, by.values())), len(by)) for n, by in own.items()}
    alive = {number for number, num in zip(of_row, learnt, strict=True) if num}
    return {n: own if n in alive else _Sums(0, 0, own.num_samples) for n, own in found.items()}


def _trained_segments(
    rows: Sequence[ScoredTrajectory], masked: Sequence[MaskedSegment]
) -> list[frozenset[int]]:
    """Per row the indices of the policy segments that are in the loss."""
    out = {(m.group_id, m.sample, m.segment) for m in masked}
    policy = {
        (s.trajectory.group_id, s.trajectory.sample, score.segment)
        for s in rows
        for score in s.scores
    }
    if out - policy:
        raise ValueError(f"masked segments are not in the batch: {sorted(out - policy)}")
    return [
        frozenset(
            score.segment
            for score in s.scores
            if (s.trajectory.group_id, s.trajectory.sample, score.segment) not in out
        )
        for s in rows
    ]


def _kept(
    rows: Sequence[ScoredTrajectory],
    planned: Sequence[frozenset[int]],
    left_out: Collection[SampleId],
) -> list[frozenset[int]]:
    """The segments of `planned` that are learnt from: none of the samples (group, number) left out.

    Divisors still count those, so the others' share of the gradient stays the same. A mini-batch of
    left-out samples alone is no optimizer step.
    """
    pairs = zip(_names(rows), planned, strict=True)
    return [frozenset() if name in left_out else own for name, own in pairs]


def _policy_tokens(rows: Sequence[ScoredTrajectory], kept: Sequence[frozenset[int]]) -> list[int]:
    """Number of tokens of these segments, by row."""
    return [
        sum(len(scored.trajectory.segments[index].token_ids) for index in own)
        for scored, own in zip(rows, kept, strict=True)
    ]


def _micro_batch(
    rows: Sequence[ScoredTrajectory],
    advantages_B: Float32s,
    kept: Sequence[frozenset[int]],
    of_batch: _Sums,
    shares_B: npt.NDArray[np.float64] | None,
    policy_version: int,
    replay_routes: bool,
    bin_tokens: int,
    taken: Sequence[Taken] | None,
) -> MicroBatch:
    shape = (len(rows), max(num_tokens(s.trajectory) for s in rows))
    routes = padded_routes([recorded_routes(s) for s in rows] if replay_routes else [], shape[1])
    batch = MicroBatch(
        token_ids_BT=np.zeros(shape, np.int64),
        real_BT=np.zeros(shape, np.bool_),
        loss_mask_BT=np.zeros(shape, np.bool_),
        behavior_logprobs_BT=np.zeros(shape, np.float32),
        proximal_logprobs_BT=np.zeros(shape, np.float32),
        is_true_anchor_BT=np.zeros(shape, np.bool_),
        is_scored_BT=np.zeros(shape, np.bool_),
        is_after_pull_BT=np.zeros(shape, np.bool_),
        temperature_BT=np.ones(shape, np.float32),
        advantages_B=np.asarray(advantages_B, np.float32),
        num_batch_loss_tokens=of_batch.num_tokens,
        num_batch_learnt=of_batch.num_learnt,
        num_batch_samples=of_batch.num_samples,
        shares_B=shares_B,
        bin_tokens=bin_tokens,
        taken=taken,
        reference_logprobs_BT=np.zeros(shape, np.float32),
        routed_experts_BTLK=None if routes is None else routes[0],
        is_routed_BT=None if routes is None else routes[1],
        ages_BT=np.zeros(shape, np.float32),
    )
    for row, (scored, segments) in enumerate(zip(rows, kept, strict=True)):
        _fill_row(batch, row, scored, segments, policy_version)
    return batch


def _fill_row(
    batch: MicroBatch,
    row: int,
    scored: ScoredTrajectory,
    kept: frozenset[int],
    policy_version: int,
) -> None:
    scores = {score.segment: score for score in scored.scores}
    start = 0
    first = next(s.policy_version for s in scored.trajectory.segments if is_sampled(s))
    for index, segment in enumerate(scored.trajectory.segments):
        here = (row, slice(start, start + len(segment.token_ids)))
        start += len(segment.token_ids)
        batch.token_ids_BT[here] = segment.token_ids.numpy()
        batch.real_BT[here] = True
        if index not in kept:
            continue
        assert segment.behavior_logprobs is not None, "validated before"
        batch.loss_mask_BT[here] = True
        batch.behavior_logprobs_BT[here] = segment.behavior_logprobs.numpy()
        batch.proximal_logprobs_BT[here] = scores[index].proximal_logprobs.numpy()
        reference = scores[index].reference_logprobs
        assert batch.reference_logprobs_BT is not None, "made above"
        assert batch.ages_BT is not None, "likewise"
        batch.ages_BT[here] = policy_version - segment.policy_version
        batch.reference_logprobs_BT[here] = np.nan if reference is None else reference.numpy()
        batch.is_true_anchor_BT[here] = scores[index].anchor == "sampled"
        batch.is_scored_BT[here] = scores[index].anchor != "behavior"
        batch.is_after_pull_BT[here] = segment.policy_version != first
        batch.temperature_BT[here] = segment.temperature


def _token_counts(
    rows: Sequence[ScoredTrajectory], kept: Sequence[frozenset[int]], policy_version: int
) -> dict[str, Any]:
    """Trained tokens by staleness and by anchor."""
    staleness: Counter[int] = Counter()
    anchors: Counter[str] = Counter()
    for scored, segments in zip(rows, kept, strict=True):
        for score in scored.scores:
            segment = scored.trajectory.segments[score.segment]
            if score.segment in segments and is_sampled(segment):
                staleness[policy_version - segment.policy_version] += len(segment.token_ids)
                anchors[score.anchor] += len(segment.token_ids)
    by_staleness = {str(age): num for age, num in sorted(staleness.items())}
    return {"staleness": by_staleness, "anchors": dict(sorted(anchors.items()))}
