"""The segments of a sample: those that the policy sampled, turns, and numbers of tokens. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator

from rlstreams.schemas.events import Segment, Trajectory


def sampled_segments(event: Trajectory) -> list[Segment]:
    """Return the policy's segments in order, of all rows; some may be empty."""
    return [segment for segment in event.segments if segment.author == "policy"]


def is_sampled(segment: Segment) -> bool:
    """Whether the segment holds tokens of the policy."""
    return segment.author == "policy" and len(segment.token_ids) > 0


def turns(segments: Iterable[Segment]) -> Iterator[tuple[str, list[Segment], list[int]]]:
    """Yield author, segments and token ids of each turn behind a prompt: neighbours of one author.

    Raises:
        schemas.TensorError: tokens that cannot be read.
    """
    for author, run in itertools.groupby(segments, lambda segment: segment.author):
        own = list(run)
        if author != "prompt":
            yield author, own, ids_of(own)


def ids_of(segments: Iterable[Segment]) -> list[int]:
    """Return all token ids of these segments; raises as `turns`."""
    return [token for segment in segments for token in segment.token_ids.numpy().tolist()]


def num_sampled(event: Trajectory) -> int:
    """Return the number of tokens that the policy sampled."""
    return sum(len(segment.token_ids) for segment in sampled_segments(event))


def num_tokens(event: Trajectory) -> int:
    """Return the number of tokens of all segments."""
    return sum(len(segment.token_ids) for segment in event.segments)
