"""The segments of a sample that the policy sampled, and numbers of tokens. Pure."""

from __future__ import annotations

from rlstreams.schemas.events import Segment, Trajectory


def sampled_segments(event: Trajectory) -> list[Segment]:
    """Return the policy's segments in order, of all rows; some may be empty."""
    return [segment for segment in event.segments if segment.author == "policy"]


def is_sampled(segment: Segment) -> bool:
    """Whether the segment holds tokens of the policy."""
    return segment.author == "policy" and len(segment.token_ids) > 0


def num_sampled(event: Trajectory) -> int:
    """Return the number of tokens that the policy sampled."""
    return sum(len(segment.token_ids) for segment in sampled_segments(event))


def num_tokens(event: Trajectory) -> int:
    """Return the number of tokens of all segments."""
    return sum(len(segment.token_ids) for segment in event.segments)
