"""Records of requests, held against what an engine core gives, without a vLLM.

Against a real one: tests/contract/test_vllm_records.py.
"""

from __future__ import annotations

import base64
from types import SimpleNamespace
from typing import Any

import numpy as np

from rlstreams.workers.weights.link.vllm_records import KEY, RequestRecords


def started(records: RequestRecords, request_id: str, *, asks: bool = True) -> SimpleNamespace:
    params = SimpleNamespace(extra_args={KEY: True} if asks else None, logprobs=None)
    request = SimpleNamespace(request_id=request_id, sampling_params=params, num_preemptions=0)
    records.begin(request)
    return request


def output(request_id: str, logprobs: list[float], reason: str | None = None) -> Any:
    rows = SimpleNamespace(logprobs=np.array([[p, -9.0] for p in logprobs], np.float32))
    return SimpleNamespace(
        request_id=request_id, new_token_ids=[3] * len(logprobs), new_logprobs=rows,
        finish_reason=reason, kv_transfer_params=None,
    )  # fmt: skip


def step(records: RequestRecords, *outputs: Any) -> None:
    records.note({0: SimpleNamespace(outputs=list(outputs))})


def test_an_answer_carries_what_each_label_sampled() -> None:
    """Several tokens a step (speculation), none in another (a preemption), labels in between."""
    records = RequestRecords()
    request = started(records, "a")
    assert 0 == request.sampling_params.logprobs
    records.label = "0-x"
    step(records, output("a", [-1.0, -2.0]), output("a", []))
    records.label = ""  # an update began; whatever is sampled now has no version
    step(records, output("a", [-3.0]))
    records.label, request.num_preemptions = "1-y", 1
    last = output("a", [-4.0], "length")
    step(records, last)
    assert last.new_logprobs is None
    told = last.kv_transfer_params[KEY]
    logprobs = np.frombuffer(base64.b64decode(told["logprobs"]), "<f4")
    assert [-1.0, -2.0, -3.0, -4.0] == logprobs.tolist()
    spans = [(s["version"], s["start"], s["end"]) for s in told["weight_versions"]]
    assert [("0-x", 0, 2), ("", 2, 3), ("1-y", 3, 4)] == spans
    assert 1 == told["num_preemptions"]
    assert records.end("a") is None


def test_who_asks_for_no_record_is_left_alone() -> None:
    """Another client of the server gets its log-probs as ever."""
    records = RequestRecords()
    request = started(records, "b", asks=False)
    last = output("b", [-1.0], "stop")
    step(records, last)
    assert request.sampling_params.logprobs is None
    assert last.new_logprobs is not None
    assert last.kv_transfer_params is None


def test_a_request_that_is_aborted_before_its_first_token_has_an_empty_record() -> None:
    """An error here would end the engine core, and every request with it."""
    records = RequestRecords()
    started(records, "d")
    told = records.end("d")
    assert ("", [], 0) == tuple(told[KEY].values())


def test_an_aborted_request_keeps_what_it_had() -> None:
    """A pause with abort answers with the tokens so far; their record comes with it."""
    records = RequestRecords()
    started(records, "c")
    records.label = "0-x"
    step(records, output("c", [-1.0]))
    told = records.end("c")
    assert [{"version": "0-x", "start": 0, "end": 1}] == told[KEY]["weight_versions"]
