"""Routed experts in a call's record: rows of the tokens that its client received, and no others."""

from __future__ import annotations

import numpy as np
import pytest

from rlstreams.workers.engines.base import FinishReason, GeneratedSegment
from rlstreams.workers.engines.sampled import sampled_of
from rlstreams.workers.gateway.records import experts_of

NUM_PROMPT, NUM_OLD, NUM_NEW = 10, 5, 20
NUM_TOKENS = NUM_PROMPT + NUM_OLD + NUM_NEW


def segment(version: int, num: int, rows: np.ndarray, start: int) -> GeneratedSegment:
    """Tokens 0, 1, ... of this version."""
    return GeneratedSegment(
        token_ids=np.arange(num, dtype=np.int32),
        logprobs=np.zeros(num, np.float32),
        policy_version=version,
        weight_hash="h",
        finish_reason=FinishReason.STOP,
        routed_experts=rows,
        routed_experts_start=start,
    )


def decoded(ids: list[int]) -> str:
    return "".join(chr(ord("a") + token) for token in ids)


@pytest.mark.parametrize("num_kept", [1, 3, NUM_NEW])
@pytest.mark.parametrize("first_row", [0, NUM_PROMPT - 1])
def test_rows_behind_a_stop_string_are_dropped(num_kept: int, first_row: int) -> None:
    """Also if the policy changed in mid-call, and the stop string is in what the later one said."""
    rows = np.arange(NUM_TOKENS - 1, dtype=np.uint8).reshape(-1, 1, 1)
    behind = NUM_PROMPT + NUM_OLD - 1  # the first row that the later version computed
    segments = [segment(0, NUM_OLD, rows[:behind], 0), segment(1, NUM_NEW, rows[behind:], behind)]
    stop = decoded(list(range(NUM_OLD)) + list(range(num_kept)))
    sampled = sampled_of(segments, NUM_PROMPT, 0, [stop], decoded)
    assert num_kept == len(sampled.segments[-1].token_ids)
    found = experts_of(sampled, first_row)
    assert found is not None
    expected = rows[first_row : NUM_PROMPT + NUM_OLD + num_kept - 1]
    assert np.array_equal(expected, found.numpy())
