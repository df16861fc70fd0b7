"""Routed experts of a whole sample: each row of the version that first passed its token."""

from __future__ import annotations

import numpy as np

from rlstreams.workers.engines.base import FinishReason, GeneratedSegment
from rlstreams.workers.rollout.episode import EnvironmentSegment
from rlstreams.workers.rollout.trajectory import stitch_experts


def sampled(num_tokens: int, version: int, start: int = 0, rows: int | None = None):
    """Rows name the version that made them."""
    experts = None if rows is None else np.array([[[version, 100]]] * rows)
    return GeneratedSegment(
        token_ids=np.zeros(num_tokens, np.int32),
        logprobs=np.zeros(num_tokens, np.float32),
        policy_version=version,
        weight_hash="",
        finish_reason=FinishReason.STOP,
        routed_experts=None if experts is None else experts.astype(np.uint8),
        routed_experts_start=start,
    )


def observed(num_tokens: int) -> EnvironmentSegment:
    return EnvironmentSegment(token_ids=np.zeros(num_tokens, np.int32), text="")


def versions_of(said, num_prompt: int) -> list[int]:
    """By row; -1 where none is recorded."""
    whole, mask = stitch_experts(said, num_prompt)
    assert whole is not None
    found = whole[:, 0, 0].astype(int)
    return np.where(mask == 0, -1, found).tolist() if mask is not None else found.tolist()


def test_a_later_turn_brings_the_rows_of_what_was_said_since() -> None:
    """The last token of a turn and the environment's are passed with the next turn; none before."""
    said = [sampled(3, 4, 0, rows=4), observed(2), sampled(2, 5, 0, rows=8)]
    assert versions_of(said, num_prompt=2) == [4, 4, 4, 4, 5, 5, 5, 5]


def test_rows_that_a_turn_did_not_bring_are_not_taken_from_other_weights() -> None:
    """A later request passes all tokens again: under another version those are other routes."""
    said = [sampled(3, 4), observed(2), sampled(2, 5, 0, rows=8)]
    assert versions_of(said, num_prompt=2) == [-1, -1, -1, -1, 5, 5, 5, 5]


def test_rows_that_a_turn_did_not_bring_are_taken_from_the_same_weights() -> None:
    """The same version passes the same tokens along the same routes."""
    said = [sampled(3, 4), observed(2), sampled(2, 4, 0, rows=8)]
    assert versions_of(said, num_prompt=2) == [4] * 8


def test_a_segment_behind_a_pull_begins_with_the_last_token_before_it() -> None:
    """That token was sampled under the old weights and passed under the new ones."""
    said = [sampled(3, 4, 0, rows=4), sampled(2, 5, 4, rows=2)]
    assert versions_of(said, num_prompt=2) == [4, 4, 4, 4, 5, 5]


def test_a_resumed_request_does_not_rewrite_history() -> None:
    """A server that returns all rows under new weights changes no row of before."""
    said = [sampled(3, 4, 0, rows=4), sampled(2, 5, 0, rows=6)]
    assert versions_of(said, num_prompt=2) == [4, 4, 4, 4, 5, 5]


def test_without_rows_nothing_is_recorded() -> None:
    """Neither zeros nor a mask."""
    assert stitch_experts([sampled(3, 4)], 2) == (None, None)
