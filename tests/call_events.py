"""Builders of events of agents; see `factories.py`."""

from __future__ import annotations

from typing import Any

import numpy as np

from rlstreams.schemas.events import (
    CallCommitted,
    CallFailed,
    CallReplayed,
    OutcomeReported,
    Segment,
    SessionClosed,
    SessionOpened,
    Tensor,
)

NOW_MS = 1_795_000_000_000
HASH = "a1" * 32


def _ids(num_tokens: int, start: int = 0) -> Tensor:
    return Tensor.of(np.arange(start, start + num_tokens, dtype=np.int32))


def answered(num_tokens: int = 3, version: int = 2, start: int = 100) -> Segment:
    """Tokens of the policy, by one version."""
    return Segment(
        author="policy",
        token_ids=_ids(num_tokens, start),
        policy_version=version,
        weight_hash=HASH,
        load_id=f"rollout-0/{version}",
        behavior_logprobs=Tensor.of(np.full(num_tokens, -0.5, np.float32)),
        finish_reason="stop",
    )


def session_opened(**changes: Any) -> SessionOpened:
    values = {
        "session_id": "7/1",
        "group_id": "7",
        "sample": 1,
        "group_size": 4,
        "purpose": "train",
        "row": 3,
        "dataset_epoch": 0,
        "replacement": 0,
        "start": 0,
        "agent": "solver",
        "agent_hash": HASH,
        "seed": 5,
        "at_ms": NOW_MS,
    }
    return SessionOpened(**{**values, **changes})


def call_committed(**changes: Any) -> CallCommitted:
    """The first call of a session: five tokens of a prompt and an answer of three."""
    values = {
        "session_id": "7/1",
        "group_id": "7",
        "call_id": "c0" * 16,
        "start": 0,
        "ordinal": 0,
        "request_hash": HASH,
        "occurrence": 0,
        "parent": None,
        "why_root": "",
        "prompt_tokens": 5,
        "new_ids": _ids(5),
        "segments": (answered(3),),
        "finish_reason": "stop",
        "dialect": "chat",
        "received_at_ms": NOW_MS,
        "finished_at_ms": NOW_MS + 900,
    }
    return CallCommitted(**{**values, **changes})


def call_replayed(**changes: Any) -> CallReplayed:
    values = {"session_id": "7/1", "group_id": "7", "start": 1, "call_id": "c0" * 16}
    return CallReplayed(**{**values, "at_ms": NOW_MS, **changes})


def call_failed(**changes: Any) -> CallFailed:
    values = {
        "session_id": "7/1",
        "group_id": "7",
        "start": 0,
        "request_hash": HASH,
        "occurrence": 0,
        "status": 400,
        "reason": "the prompt has 900 tokens, the model takes 512",
        "at_ms": NOW_MS,
    }
    return CallFailed(**{**values, **changes})


def session_closed(**changes: Any) -> SessionClosed:
    values = {
        "session_id": "7/1",
        "group_id": "7",
        "sample": 1,
        "start": 0,
        "kind": "ended",
        "detail": "",
        "num_calls": 1,
        "opened_at_ms": NOW_MS,
        "at_ms": NOW_MS + 2_000,
    }
    return SessionClosed(**{**values, **changes})


def outcome_reported(**changes: Any) -> OutcomeReported:
    values = {
        "session_id": "7/1",
        "group_id": "7",
        "outcome_id": "o1",
        "kind": "reward",
        "reward": 1.0,
        "grader": "verifier",
        "at_ms": NOW_MS + 2_000,
    }
    return OutcomeReported(**{**values, **changes})
