"""Score a window of trajectories: choose versions, run the scorer, align log-probs to segments."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rlstreams.schemas.events import SegmentScore, Tensor, Trajectory
from rlstreams.workers.engines.base import Scorer, Scores, TokenSequence
from rlstreams.workers.logprob.versions import Anchor, choose

Jobs = defaultdict[tuple[int, float], set[int]]  # version and temperature -> places in the window


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """How the scorer came to hold a version."""

    weight_hash: str
    load_id: str


def plan_anchors(
    window: Sequence[Trajectory], held: Collection[int], served: Collection[int]
) -> dict[int, Anchor]:
    """The anchor for every version that sampled something in the window."""
    sampled = {
        segment.policy_version
        for trajectory in window
        for segment in trajectory.segments
        if segment.author == "policy"
    }
    return {version: choose(version, held, served) for version in sorted(sampled)}


def score_window(
    window: Sequence[Trajectory],
    anchors: Mapping[int, Anchor],
    loads: Mapping[int, Load],
    scorer: Scorer,
    token_budget: int,
    *,
    replay_routes: bool = False,
) -> list[tuple[SegmentScore, ...]]:
    """The scores of each trajectory, one per policy segment, in order.

    A trajectory that spans versions is scored once under each of their anchors; with
    `replay_routes` each time along the routes that were recorded, whichever version took them.

    Raises:
        EngineError: the scorer refused or failed.
    """
    jobs: Jobs = defaultdict(set)
    for index, trajectory in enumerate(window):
        for segment in trajectory.segments:
            if segment.author == "policy":
                anchor = anchors[segment.policy_version]
                if anchor.label != "behavior":
                    jobs[anchor.policy_version, segment.temperature].add(index)
    scores = run_jobs(jobs, window, scorer, token_budget, replay_routes=replay_routes)
    return [
        tuple(
            _segment_scores(
                trajectory,
                anchors,
                loads,
                {(v, t): found for (v, t, i), found in scores.items() if i == index},
            )
        )
        for index, trajectory in enumerate(window)
    ]


def run_jobs(
    jobs: Jobs,
    window: Sequence[Trajectory],
    scorer: Scorer,
    token_budget: int,
    *,
    replay_routes: bool = False,
) -> dict[tuple[int, float, int], Scores]:
    """Scores by version, temperature and index into the window.

    Raises:
        EngineError: the scorer refused or failed.
    """
    scores: dict[tuple[int, float, int], Scores] = {}
    for (version, temperature), indices in sorted(jobs.items()):
        for batch in _batches(sorted(indices), window, token_budget):
            sequences = [_sequence(window[index], replay_routes) for index in batch]
            for index, found in zip(
                batch, scorer.score(sequences, version, temperature), strict=True
            ):
                scores[version, temperature, index] = found
    return scores


def num_tokens(trajectory: Trajectory) -> int:
    """Tokens of all segments."""
    return sum(len(segment.token_ids) for segment in trajectory.segments)


def _sequence(trajectory: Trajectory, replay_routes: bool) -> TokenSequence:
    ids = np.concatenate([segment.token_ids.numpy() for segment in trajectory.segments])
    experts, mask = trajectory.routed_experts, trajectory.routed_experts_mask
    if not replay_routes or experts is None:
        return TokenSequence(token_ids=ids)
    return TokenSequence(
        token_ids=ids,
        routed_experts=experts.numpy(),
        routed_experts_mask=None if mask is None else mask.numpy(),
    )


def _batches(
    indices: Sequence[int], window: Sequence[Trajectory], token_budget: int
) -> list[list[int]]:
    """Forwards of at most `token_budget` tokens, padding included; like lengths together."""
    batches: list[list[int]] = []
    for index in sorted(indices, key=lambda i: num_tokens(window[i])):
        longest = num_tokens(window[index])  # they come in rising order
        if not batches or longest * (len(batches[-1]) + 1) > token_budget:
            batches.append([])
        batches[-1].append(index)
    return batches


def _segment_scores(
    trajectory: Trajectory,
    anchors: Mapping[int, Anchor],
    loads: Mapping[int, Load],
    scores_of: Mapping[tuple[int, float], Scores],
) -> list[SegmentScore]:
    found, start = [], 0
    for index, segment in enumerate(trajectory.segments):
        end = start + len(segment.token_ids)
        if segment.author == "policy":
            anchor = anchors[segment.policy_version]
            if anchor.label == "behavior":
                assert segment.behavior_logprobs is not None  # validated
                logprobs, entropy, load = (
                    segment.behavior_logprobs,
                    None,
                    Load(weight_hash="", load_id=""),
                )
            else:
                scores = scores_of[anchor.policy_version, segment.temperature]
                logprobs = Tensor.of(scores.logprobs[start:end])
                entropy = Tensor.of(scores.entropy[start:end])
                load = loads[anchor.policy_version]
            found.append(
                SegmentScore(
                    segment=index,
                    anchor=anchor.label,
                    policy_version=anchor.policy_version,
                    proximal_logprobs=logprobs,
                    weight_hash=load.weight_hash,
                    load_id=load.load_id,
                    entropy=entropy,
                )
            )
        start = end
    return found
