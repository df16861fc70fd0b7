"""A turn is asked for as it was given, and resumed with its tokens so far."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import numpy as np

from rlstreams.workers.engines.base import FinishReason, GeneratedSegment, SampleRequest, Sampling
from rlstreams.workers.engines.turn import whole_turn


class Cut:
    """An engine that aborts the first requests."""

    name = "cut"

    def __init__(self, num_aborts: int) -> None:
        self.asked: list[SampleRequest] = []
        self._num_aborts = num_aborts

    async def generate(self, request: SampleRequest) -> AsyncIterator[GeneratedSegment]:
        self.asked.append(request)
        is_cut = len(self.asked) <= self._num_aborts
        yield GeneratedSegment(
            token_ids=np.array([len(self.asked)], np.int32),
            logprobs=np.zeros(1, np.float32),
            policy_version=0,
            weight_hash="",
            finish_reason=FinishReason.ABORT if is_cut else FinishReason.STOP,
        )


async def test_only_a_turn_that_was_cut_is_asked_for_anew() -> None:
    """Copying prompt and request costs 5 us, so what nothing cut is passed on as it is."""
    request = SampleRequest(
        sample_id="0/0/0",
        group_id="0",
        token_ids=np.array([7, 8], np.int32),
        prompt_tokens=2,
        sampling=Sampling(max_new_tokens=4),
        seed=0,
    )
    engine: Any = Cut(num_aborts=2)
    segments = await whole_turn(engine, request)
    assert engine.asked[0] is request
    assert [one.token_ids.tolist() for one in engine.asked] == [[7, 8], [7, 8, 1], [7, 8, 1, 2]]
    assert [one.token_ids.tolist() for one in segments] == [[1], [2], [3]]
