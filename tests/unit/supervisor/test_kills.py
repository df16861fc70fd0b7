"""Kills for show."""

from __future__ import annotations

from rlstreams.up.supervisor.run import kills_ahead
from rlstreams.workers.config.operation import Kill

ROLLOUT, LOGPROB = Kill(role="rollout", at=0.33), Kill(role="logprob", at=0.66)


def test_a_resumed_run_does_not_kill_again() -> None:
    """They come in the order of their shares; those before its first step are past."""
    assert [ROLLOUT, LOGPROB] == list(kills_ahead([LOGPROB, ROLLOUT], 0, 60))
    assert [LOGPROB] == list(kills_ahead([ROLLOUT, LOGPROB], 30, 60))
