"""A commit on a thread of its own says whether it has ended, and how."""

from __future__ import annotations

import threading

import pytest

from rlstreams.streams.kafka.producer import KafkaCommit
from rlstreams.streams.log.errors import OutcomeUnknownError

ENOUGH_S = 60.0


def test_a_call_that_never_returns_is_an_unknown_outcome() -> None:
    """Far beyond its deadline the wait names the transactional id."""
    go = threading.Event()

    def commit() -> None:
        go.wait(ENOUGH_S)

    under_way = KafkaCommit(commit, "run.rollout.0", commit_s=-ENOUGH_S)
    with pytest.raises(OutcomeUnknownError, match=r"run\.rollout\.0"):
        under_way.wait(0.0)
    go.set()
