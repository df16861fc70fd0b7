"""Routed experts of a whole sample: each row of the version that first passed its token."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

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


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        # The last token of a turn and the environment's are passed with the next turn.
        ([sampled(3, 4, 0, rows=4), observed(2), sampled(2, 5, 0, rows=8)], [4] * 4 + [5] * 4),
        # A later request passes all tokens again: under another version those are other routes,
        ([sampled(3, 4), observed(2), sampled(2, 5, 0, rows=8)], [-1] * 4 + [5] * 4),
        # and under the same version the same ones.
        ([sampled(3, 4), observed(2), sampled(2, 4, 0, rows=8)], [4] * 8),
        # The last token before a pull was sampled under the old weights and passed under the new.
        ([sampled(3, 4, 0, rows=4), sampled(2, 5, 4, rows=2)], [4] * 4 + [5] * 2),
        # A server that returns all rows under new weights changes no row of before.
        ([sampled(3, 4, 0, rows=4), sampled(2, 5, 0, rows=6)], [4] * 4 + [5] * 2),
    ],
)
def test_a_row_is_of_the_version_that_first_passed_its_token(
    said: list[Any], expected: list[int]
) -> None:
    """Behind a prompt of two tokens; -1 where none is recorded."""
    whole, mask = stitch_experts(said, 2)
    found = whole[:, 0, 0].astype(int)
    assert expected == (found if mask is None else np.where(mask == 0, -1, found)).tolist()


def test_without_rows_nothing_is_recorded() -> None:
    """Neither zeros nor a mask."""
    assert stitch_experts([sampled(3, 4)], 2) == (None, None)
