"""Who shares a broadcast with whom."""

from __future__ import annotations

import socket

from rlstreams.workers.weights.link.frames import Connection
from rlstreams.workers.weights.link.handshake import Hello
from rlstreams.workers.weights.members import Member
from rlstreams.workers.weights.membership import apart


def member(name: str, gpu: str) -> Member:
    link = Connection(socket.socket(), name)
    link.close()
    hello = Hello(receiver=name, rank=0, epoch=1, purpose="member")
    return Member(hello=hello, link=link, gpu=gpu)


def test_two_receivers_on_one_gpu_are_sent_to_one_after_the_other() -> None:
    """NCCL refuses a group with two ranks on a GPU; the second one gets a broadcast of its own."""
    server, scorer, other = member("server", "A"), member("scorer", "A"), member("other", "B")
    everyone = [server, scorer, other]
    assert [server, other] == apart(server, everyone)
    assert [scorer, other] == apart(scorer, everyone)


def test_receivers_without_a_gpu_share_a_broadcast() -> None:
    """On CPUs, and pieces that do not tell."""
    first, second = member("first", ""), member("second", "")
    assert [first, second] == apart(first, [first, second])
