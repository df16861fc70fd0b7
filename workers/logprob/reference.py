"""The policy that training stays close to: weights that never change, scored beside the sampling
version's.

A trajectory's reference log-probs are recorded with its scores, so the trainer, its redo and every
replay need the log alone. All of a window's trajectories are scored in batches of the same rule as
under the versions, so a replayed window gives the same bits.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from rlstreams.schemas.events import SegmentScore, Tensor, Trajectory
from rlstreams.workers.engines.base import Scorer
from rlstreams.workers.logprob.scoring import Jobs, run_jobs


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """A scorer that holds it, and which it is."""

    scorer: Scorer
    policy_version: int  # as the scorer numbers it
    weight_hash: str


def with_reference(
    scores: Sequence[tuple[SegmentScore, ...]],
    window: Sequence[Trajectory],
    reference: Reference,
    token_budget: int,
) -> list[tuple[SegmentScore, ...]]:
    """The same scores, with the reference's log-probs of every policy segment.

    Under the temperature that sampled the segment, as all log-probs of the loss are.

    Raises:
        EngineError: the scorer refused or failed.
    """
    jobs: Jobs = defaultdict(set)
    for index, trajectory in enumerate(window):
        for segment in trajectory.segments:
            if segment.author == "policy":
                jobs[reference.policy_version, segment.temperature].add(index)
    found = run_jobs(jobs, window, reference.scorer, token_budget)
    compared = []
    for index, (trajectory, of_trajectory) in enumerate(zip(window, scores, strict=True)):
        ends = [0]
        for segment in trajectory.segments:
            ends.append(ends[-1] + len(segment.token_ids))
        by_segment = []
        for score in of_trajectory:
            at = slice(ends[score.segment], ends[score.segment + 1])
            temperature = trajectory.segments[score.segment].temperature
            logprobs = found[reference.policy_version, temperature, index].logprobs[at]
            by_segment.append(
                replace(
                    score,
                    reference_logprobs=Tensor.of(logprobs),
                    reference_hash=reference.weight_hash,
                )
            )
        compared.append(tuple(by_segment))
    return compared
