"""Which groups a sender keeps."""

from __future__ import annotations

import socket

import torch

from rlstreams.workers.weights.groups import GROUPS_KEPT, Groups
from rlstreams.workers.weights.link.frames import Connection
from rlstreams.workers.weights.link.handshake import Hello
from rlstreams.workers.weights.members import Member


def rank(number: int) -> Member:
    link = Connection(socket.socket(), "server")
    link.close()
    hello = Hello(receiver="server", rank=number, epoch=1, purpose="member")
    return Member(hello=hello, link=link, gone="")


def test_ranks_that_take_turns_keep_their_groups() -> None:
    """A server of eight ranks: no group is formed anew for the second version."""
    ranks = [rank(number) for number in range(2 * GROUPS_KEPT)]
    groups = Groups("gloo", torch.device("cpu"), 60.0)
    told = [groups.get([member], len(ranks)) for _ in range(2) for member in ranks]
    assert [is_new for _, _, is_new in told] == [True] * len(ranks) + [False] * len(ranks)


def test_groups_that_nobody_uses_go() -> None:
    """Two members and many sets of them: the least recently used group is formed anew."""
    members = [rank(number) for number in range(GROUPS_KEPT + 1)]
    groups = Groups("gloo", torch.device("cpu"), 60.0)
    first = [groups.get([member], 1)[2] for member in members]
    assert first == [True] * len(members)
    assert groups.get([members[-1]], 1)[2] is False
    assert groups.get([members[0]], 1)[2] is True
