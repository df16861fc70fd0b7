"""For whom a broadcast waits, how long, and who shares it."""

from __future__ import annotations

import socket
import time

import pytest
import torch

from rlstreams.workers.weights.link.frames import Connection
from rlstreams.workers.weights.link.handshake import Hello
from rlstreams.workers.weights.members import Member
from rlstreams.workers.weights.membership import PATIENCE_S, Membership
from rlstreams.workers.weights.transfer import GROUPS_KEPT, Groups

VERSION = 7
WINDOW_S = 100.0  # the time that a test takes is little beside it


def member(name: str, gpu: str = "", rank: int = 0) -> Member:
    link = Connection(socket.socket(), name)
    link.close()
    hello = Hello(receiver=name, rank=rank, epoch=1, purpose="member")
    return Member(hello=hello, link=link, gpu=gpu)


def left_s(
    ready: list[Member],
    *late: Member,
    window_s: float = WINDOW_S,
    took_s: float = 0.0,
    asked: str = "",
) -> float:
    """Of the window of members that have become ready now, beside others that have not."""
    membership = Membership()
    membership.members += [*ready, *late]
    for one in ready:
        one.wants, one.since_s = VERSION, time.monotonic()
    if asked:
        membership.ask(asked, VERSION, "rollout-1")
    return membership.window_left_s(ready, window_s, took_s)


def test_one_on_the_same_gpu_is_not_awaited() -> None:
    """NCCL has one rank of a group on each GPU."""
    assert left_s([member("server", gpu="A")], member("scorer", gpu="A")) == 0.0


@pytest.mark.parametrize(("took_s", "longest_s"), [(0.8, 0.8), (1000.0, PATIENCE_S)])
def test_one_that_has_asked_is_awaited_for_what_another_broadcast_would_take(
    took_s: float, longest_s: float
) -> None:
    """But one that asked and hangs does not stop the others as long as a slow transfer takes."""
    early, late = member("early"), member("late")
    assert left_s([early], late, window_s=0.0, took_s=took_s) == 0.0  # it may not come at all
    before_s = time.monotonic()
    found_s = left_s([early], late, window_s=0.0, took_s=took_s, asked="late")
    assert longest_s - (time.monotonic() - before_s) <= found_s <= longest_s


def test_ranks_that_take_turns_keep_their_groups() -> None:
    """A server of eight ranks: no group is formed anew for the second version."""
    ranks = [member("server", rank=number) for number in range(2 * GROUPS_KEPT)]
    groups = Groups(torch.device("cpu"), 60.0)
    told = [groups.get([one], len(ranks), "gloo") for _ in range(2) for one in ranks]
    assert [is_new for _, _, is_new in told] == [True] * len(ranks) + [False] * len(ranks)


def test_groups_that_nobody_uses_go() -> None:
    """Two members and many sets of them: the least recently used group is formed anew."""
    members = [member("server", rank=number) for number in range(GROUPS_KEPT + 1)]
    groups = Groups(torch.device("cpu"), 60.0)
    assert [groups.get([one], 1, "gloo")[2] for one in members] == [True] * len(members)
    assert groups.get([members[-1]], 1, "gloo")[2] is False
    assert groups.get([members[0]], 1, "gloo")[2] is True
