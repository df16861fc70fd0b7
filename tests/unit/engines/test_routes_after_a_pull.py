"""Routed experts of an answer that spans versions: whose rows they are, if it was retracted."""

from __future__ import annotations

import base64

import numpy as np
import pytest

from rlstreams.workers.engines.base import Held
from rlstreams.workers.engines.served.answer import cut
from rlstreams.workers.engines.served.sglang import SglangAdapter
from rlstreams.workers.engines.served.shape import ModelShape
from rlstreams.workers.engines.served.wire import GenerateRequest

NUM_GIVEN, NUM_TOKENS, PULLED_AT = 3, 4, 2
SHAPE = ModelShape(
    vocab_size=16, eos_ids=frozenset({2}), num_layers=1, moe_layers=(0,), num_experts=8, top_k=1
)
OLD, NEW = Held(0, "a" * 64), Held(1, "b" * 64)


@pytest.mark.parametrize("num_retractions", [0, 1])
@pytest.mark.parametrize("is_cut", [False, True])
def test_rows_that_were_computed_anew_are_nobody_s(num_retractions: int, is_cut: bool) -> None:
    """A retracted request computes its cache again, under the new weights: so do its rows say."""
    rows = np.arange(NUM_GIVEN + NUM_TOKENS - 1, dtype="<i4")
    at = PULLED_AT if is_cut else NUM_TOKENS
    spans = [(OLD, 0, at), (NEW, at, NUM_TOKENS)]
    answer = SglangAdapter.answer(
        {
            "output_ids": [4] * NUM_TOKENS,
            "meta_info": {
                "finish_reason": {"type": "length"},
                "num_retractions": num_retractions,
                "output_token_logprobs": [[-1.0, 4, None]] * NUM_TOKENS,
                "routed_experts": base64.b64encode(rows.tobytes()).decode(),
                "weight_versions": [
                    {"version": held.label, "start": start, "end": end}
                    for held, start, end in spans
                    if end > start
                ],
            },
        }
    )
    assert answer.spans is not None
    request = GenerateRequest(
        request_id="",
        token_ids=[4] * NUM_GIVEN,
        max_new_tokens=NUM_TOKENS,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        seed=0,
        stop_token_ids=[],
        experts_start=0,
        salt="",
    )
    segments = cut(answer, answer.spans, request, SHAPE, {one.label: one for one in (OLD, NEW)})
    kept = [row for s in segments if s.routed_experts is not None for row in s.routed_experts[:, 0]]
    is_mixed = is_cut and num_retractions > 0
    assert ([] if is_mixed else list(range(len(rows)))) == [int(row[0]) for row in kept]
