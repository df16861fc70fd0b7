"""Scores of a window of trajectories, aligned to their segments; runs in the compute thread.

A trajectory that spans versions is scored once under each version that its segments ask for, and
under the reference where there is one: weights that never change, which a KL term keeps the policy
close to. One call of the scorer for each version and temperature, sequences in the window's order:
the same window gives the same bits.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from rlstreams.schemas.events import ScoredTrajectory, Segment, SegmentScore, Tensor, Trajectory
from rlstreams.streams.log.codec import now_ms
from rlstreams.streams.log.record import Record
from rlstreams.streams.rows import rows_of_sample
from rlstreams.workers.engines.base import Scorer, Scores, TokenSequence
from rlstreams.workers.logprob.versions import Anchor
from rlstreams.workers.loop.context import Context
from rlstreams.workers.model.base import EngineError, RankLostError
from rlstreams.workers.policy.puller import Load

T = TypeVar("T")
S = TypeVar("S")
Pass = tuple[int, float, int]  # version, temperature, row of the window


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """The reference policy, and the scorer that holds it."""

    scorer: Scorer
    policy_version: int  # as the scorer numbers it
    weight_hash: str


def score_records(
    context: Context,
    scorer: Scorer,
    reference: Reference | None,
    number: int,
    window: Sequence[Record[Trajectory]],
    anchors: Mapping[int, Anchor],
    loads: Mapping[int, Load],
) -> tuple[list[ScoredTrajectory | Exception], float]:
    """The event of each record of window `number`, or the error in place of one; and the seconds
    that this took. See `score_window`."""
    started_s = time.monotonic()
    replay_routes = context.config.trainer.routing_replay

    def score(part: Sequence[Record[Trajectory]]) -> list[tuple[SegmentScore, ...]]:
        events = [record.event for record in part]
        return score_window(events, anchors, loads, scorer, reference, replay_routes=replay_routes)

    found = zip(window, score_in_halves(window, score), strict=True)
    events = [
        scores
        if isinstance(scores, Exception)
        else ScoredTrajectory(
            trajectory=record.event,
            scores=scores,
            worker=context.worker,
            instance=context.instance,
            trajectory_partition=record.position.partition,
            trajectory_offset=record.position.offset,
            scored_at_ms=now_ms(),
            routing_replayed=replay_routes,
            window=number,
            window_place=place,
            window_size=len(window),
        )
        for place, (record, scores) in enumerate(found)
    ]
    return events, time.monotonic() - started_s


def score_in_halves(
    window: Sequence[T], score: Callable[[Sequence[T]], Sequence[S]]
) -> list[S | Exception]:
    """The score of each record, or what the scorer raised for it alone.

    A window that fails is split in halves, and so on: one bad record among n costs about 2 log2(n)
    forwards more.

    Raises:
        RankLostError: the scorer has lost a rank, and can score nothing any more.
        Exception: the scorer's, where several records were tried alone, each failed, and it was no
            refusal (EngineError): then the scorer is broken, and no record is to blame.
    """

    def halves(part: Sequence[T]) -> list[S | Exception]:
        try:
            return list(score(part))
        except RankLostError:
            raise
        except Exception as err:  # noqa: BLE001  (the dead-letter border)
            if len(part) <= 1:
                return [err]
        middle = len(part) // 2
        return [*halves(part[:middle]), *halves(part[middle:])]

    found = halves(window)
    errors = [result for result in found if isinstance(result, Exception)]
    if len(errors) == len(window) > 1 and not all(isinstance(e, EngineError) for e in errors):
        raise errors[0]
    return found


def score_window(
    window: Sequence[Trajectory],
    anchors: Mapping[int, Anchor],
    loads: Mapping[int, Load],
    scorer: Scorer,
    reference: Reference | None = None,
    *,
    replay_routes: bool = False,
) -> list[tuple[SegmentScore, ...]]:
    """The scores of each trajectory, one per policy segment, in order.

    Args:
        anchors: by the version that sampled.
        loads: of the versions that anchors name.
        reference: adds its log-probs to every score, under the temperature that sampled.
        replay_routes: policies take the recorded experts, whichever version took them.

    Raises:
        EngineError: a scorer refused or failed.
    """
    rows = [(place, row) for place, one in enumerate(window) for row in rows_of_sample(one)]
    parts = [part for number, (_, row) in enumerate(rows) for part in _parts(number, row)]
    sequences = [_sequence(row, replay_routes) for _, row in rows]
    under = {v: a.policy_version for v, a in anchors.items() if a.label != "behavior"}
    asked = [part for part in parts if part.segment.policy_version in under]
    found = _scores(
        scorer, (part.under(under[part.segment.policy_version]) for part in asked), sequences
    )
    compared: Mapping[Pass, Scores] = {}
    if reference is not None:
        sequences = [_sequence(row, replay_routes=False) for _, row in rows]
        version = reference.policy_version
        compared = _scores(reference.scorer, (part.under(version) for part in parts), sequences)
    scores: list[list[SegmentScore]] = [[] for _ in window]
    for part in parts:
        anchor = anchors[part.segment.policy_version]
        own = found.get(part.under(anchor.policy_version))
        score = _score(part, anchor, loads.get(anchor.policy_version), own)
        if reference is not None:
            its = compared[part.under(reference.policy_version)]
            score = replace(
                score,
                reference_logprobs=Tensor.of(its.logprobs[part.tokens]),
                reference_hash=reference.weight_hash,
                reference_top_ids=_tensor(its.top_ids, part.tokens),
                reference_top_logprobs=_tensor(its.top_logprobs, part.tokens),
            )
        scores[rows[part.row][0]].append(score)
    return [tuple(of_trajectory) for of_trajectory in scores]


class _Part(NamedTuple):
    """A segment that the policy sampled."""

    row: int  # of all rows of the window's trajectories
    number: int  # of the segment in its trajectory
    segment: Segment
    tokens: slice  # of the row

    def under(self, version: int) -> Pass:
        """The pass that scores it."""
        return version, self.segment.temperature, self.row


def _parts(number_of_row: int, row: Trajectory) -> Iterator[_Part]:
    start = 0
    for number, segment in enumerate(row.segments):
        end = start + len(segment.token_ids)
        if segment.author == "policy":
            yield _Part(number_of_row, number, segment, slice(start, end))
        start = end


def _score(part: _Part, anchor: Anchor, load: Load | None, found: Scores | None) -> SegmentScore:
    """The score of a segment; without scores the sampler's own log-probs stand in."""
    behavior = part.segment.behavior_logprobs
    assert behavior is not None  # validated
    return SegmentScore(
        segment=part.number,
        anchor=anchor.label,
        policy_version=anchor.policy_version,
        proximal_logprobs=Tensor.of(found.logprobs[part.tokens]) if found else behavior,
        weight_hash=load.weight_hash if load else "",
        load_id=load.load_id if load else "",
        entropy=Tensor.of(found.entropy[part.tokens]) if found else None,
    )


def _tensor(values: npt.NDArray[Any] | None, tokens: slice) -> Tensor | None:
    return None if values is None else Tensor.of(values[tokens])


def _scores(
    scorer: Scorer, wanted: Iterable[Pass], sequences: Sequence[TokenSequence]
) -> dict[Pass, Scores]:
    by_call: defaultdict[tuple[int, float], list[int]] = defaultdict(list)
    for version, temperature, index in sorted(set(wanted)):
        by_call[version, temperature].append(index)
    found: dict[Pass, Scores] = {}
    for (version, temperature), indices in by_call.items():
        scores = scorer.score([sequences[index] for index in indices], version, temperature)
        for index, one in zip(indices, scores, strict=True):
            found[version, temperature, index] = one
    return found


def _sequence(trajectory: Trajectory, replay_routes: bool) -> TokenSequence:
    ids = np.concatenate([segment.token_ids.numpy() for segment in trajectory.segments])
    experts, mask = trajectory.routed_experts, trajectory.routed_experts_mask
    if not replay_routes or experts is None:
        return TokenSequence(token_ids=ids, group_id=trajectory.group_id)
    return TokenSequence(
        token_ids=ids,
        group_id=trajectory.group_id,
        routed_experts=experts.numpy(),
        routed_experts_mask=None if mask is None else mask.numpy(),
    )
