"""The signs of life of another rank, as its trainer takes them."""

from __future__ import annotations

import socket
import threading

from rlstreams.workers.compute.link import ALIVE, CommandResult, Link
from rlstreams.workers.compute.team import _Follower


def test_a_rank_that_has_answered_is_in_no_slow_call() -> None:
    """Its next sign of life comes a second later: what it does by then is not that call's fault."""
    here, there = socket.socketpair()
    follower = _Follower(1, here, "127.0.0.1:7", threading.Event(), "trainer")
    link = Link(there, 5.0)
    assert link.receive() == ALIVE
    link.send("in trainer.loss.kind of mine.py:4")
    link.send(CommandResult(result=1))
    assert follower.answers.get(timeout=5).result == 1
    assert follower.slow_call == ""
    link.send("in trainer.loss.kind of mine.py:4")
    link.hang_up()
    follower.end()
    assert follower.slow_call == "in trainer.loss.kind of mine.py:4"
    link.close()
