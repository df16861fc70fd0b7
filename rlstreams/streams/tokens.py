"""The tokens of one sample as flat arrays: authors, versions and log-probs.

N is the number of tokens, prompt included; every array of a `TokenTable` has that length.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from rlstreams.schemas.events import NO_VERSION, ScoredTrajectory, Tensor, TensorError, Trajectory

Ints: TypeAlias = npt.NDArray[np.int32]
Floats: TypeAlias = npt.NDArray[np.float32]

SAMPLED = "sampled"  # anchors, as `SegmentScore` has them
_NOT_RESCORED = "behavior"


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenTable:
    """Arrays over a sample's tokens. NaN in a float array: the token has no such number."""

    ids_N: Ints
    authors: tuple[str, ...]  # one per segment
    segment_N: Ints  # index of the segment
    version_N: Ints  # NO_VERSION where no policy sampled
    behavior_N: Floats  # log-prob under the policy that sampled, nats
    proximal_N: Floats  # log-prob as rescored, nats; NaN where it only repeats `behavior`
    reference_N: Floats  # log-prob under the reference policy, nats
    entropy_N: Floats  # of the distribution that the token was rescored in, nats

    @property
    def difference_N(self) -> Floats:
        """Proximal minus behavior log-prob, nats; under one version it is engine mismatch."""
        return self.proximal_N - self.behavior_N

    @property
    def is_policy_N(self) -> npt.NDArray[np.bool_]:
        """Mask of the tokens that a policy sampled."""
        return np.isin(self.segment_N, [n for n, a in enumerate(self.authors) if a == "policy"])


def token_table(trajectory: Trajectory, scored: ScoredTrajectory | None = None) -> TokenTable:
    """Return the tokens of a trajectory, with its scores if there are any.

    Raises:
        schemas.TensorError: a tensor that cannot be read.
    """
    segments = trajectory.segments
    lengths = [len(segment.token_ids) for segment in segments]
    versions = [s.policy_version if s.author == "policy" else NO_VERSION for s in segments]
    scores = {score.segment: score for score in scored.scores} if scored else {}
    rescored = {n: s for n, s in scores.items() if s.anchor != _NOT_RESCORED}

    def per_token(tensors: Mapping[int, Tensor | None]) -> Floats:
        parts = [_part(tensors.get(n), length) for n, length in enumerate(lengths)]
        return np.concatenate([np.zeros(0, np.float32), *parts])

    return TokenTable(
        ids_N=np.concatenate([np.zeros(0, np.int32), *(s.token_ids.numpy() for s in segments)]),
        authors=tuple(segment.author for segment in segments),
        segment_N=np.repeat(np.arange(len(segments), dtype=np.int32), lengths),
        version_N=np.repeat(np.array(versions, np.int32), lengths),
        behavior_N=per_token({n: s.behavior_logprobs for n, s in enumerate(segments)}),
        proximal_N=per_token({n: score.proximal_logprobs for n, score in rescored.items()}),
        reference_N=per_token({n: score.reference_logprobs for n, score in scores.items()}),
        entropy_N=per_token({n: score.entropy for n, score in scores.items()}),
    )


def _part(tensor: Tensor | None, length: int) -> Floats:
    """Return one segment's numbers, NaN where it has none."""
    if tensor is None:
        return np.full(length, np.nan, np.float32)
    part: Floats = tensor.numpy()
    if part.shape != (length,):
        raise TensorError(f"a segment of {length} tokens has numbers of shape {part.shape}")
    return part


def mismatch(scored: ScoredTrajectory) -> float:
    """Return the engine mismatch: the largest distance of a token's proximal from its behavior
    log-prob where both are of one version, nats. NaN: no score is of the version that sampled.

    Raises:
        schemas.TensorError: tensors that cannot be read, or do not fit together.
    """
    worst = float("nan")
    for score in scored.scores:
        segment = scored.trajectory.segments[score.segment]
        if score.anchor != SAMPLED or segment.behavior_logprobs is None:
            continue
        length = len(segment.token_ids)
        behavior_T = _part(segment.behavior_logprobs, length)
        distance_T = np.abs(_part(score.proximal_logprobs, length) - behavior_T)
        if length:
            worst = float(np.fmax(worst, distance_T.max()))
    return worst
