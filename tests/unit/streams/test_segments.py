"""Segments of a sample: what the policy sampled, the turns, the numbers of tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rlstreams.schemas.events import Segment, Tensor
from rlstreams.streams.segments import is_sampled, num_sampled, num_tokens, sampled_segments, turns
from tests.factories import trajectory


def said(author: str, ids: Sequence[int]) -> Segment:
    return Segment(author=author, token_ids=Tensor.of(np.array(ids, np.int32)))


SAMPLE = trajectory(
    segments=(
        said("prompt", [1, 2]), said("policy", [3]), said("policy", [4, 5]),
        said("environment", [6]), said("policy", []),
    )
)  # fmt: skip


def test_an_environments_tokens_are_not_sampled() -> None:
    """An empty segment of the policy is its own, and holds nothing that it sampled."""
    assert (3, 6) == (num_sampled(SAMPLE), num_tokens(SAMPLE))
    assert [1, 2, 0] == [len(segment.token_ids) for segment in sampled_segments(SAMPLE)]
    assert [False, True, True, False, False] == list(map(is_sampled, SAMPLE.segments))


def test_neighbours_of_one_author_are_one_turn() -> None:
    """The prompt is none."""
    found = [(author, len(own), ids) for author, own, ids in turns(SAMPLE.segments)]
    assert [("policy", 2, [3, 4, 5]), ("environment", 1, [6]), ("policy", 1, [])] == found
