"""For whom a broadcast waits, and how long."""

from __future__ import annotations

import json
import math
import socket
import time

import torch

from rlstreams.workers.weights.link.frames import Connection
from rlstreams.workers.weights.link.handshake import Hello
from rlstreams.workers.weights.members import LoggedRequest, Member
from rlstreams.workers.weights.membership import Membership
from rlstreams.workers.weights.plans import Planner
from rlstreams.workers.weights.snapshot import Snapshots
from rlstreams.workers.weights.window import PATIENCE_S, Window

VERSION = 7
WINDOW_S = 100.0  # the time that a test takes is little beside it
HALVES, WHOLES = "float16", "float32"


class Stand:
    """A window over members that are connected."""

    def __init__(self, *members: Member, window_s: float = WINDOW_S) -> None:
        snapshots = Snapshots(torch.device("cpu"), "device")
        snapshots.take(VERSION, "hash", {"w": torch.zeros(4, 2)})
        self.membership = Membership()
        self.membership.members += members
        self.window = Window(window_s, self.membership, Planner(), snapshots)

    def left_s(self, *ready: Member) -> float:
        now_s = time.monotonic()
        for member in ready:
            member.wants, member.since_s = VERSION, now_s
        return self.window.left_s(ready[0], ready)


def member(name: str, dtype: str = WHOLES, gpu: str = "") -> Member:
    link = Connection(socket.socket(), name)
    link.close()
    hello = Hello(receiver=name, rank=0, epoch=1, purpose="member")
    return Member(hello=hello, link=link, gpu=gpu, layout=json.dumps([["w", dtype, [4, 2]]]))


def close_to(wanted_s: float, found_s: float) -> bool:
    return math.isclose(wanted_s, found_s, abs_tol=30.0)


def test_one_that_lacks_the_version_is_awaited() -> None:
    """For the window: it may be ready at any moment."""
    early, late = member("early"), member("late")
    assert close_to(WINDOW_S, Stand(early, late).left_s(early))


def test_nobody_waits_when_all_are_ready() -> None:
    """The broadcast starts at once."""
    early, late = member("early"), member("late")
    assert Stand(early, late).left_s(early, late) == 0.0


def test_one_that_wants_other_bytes_is_not_awaited() -> None:
    """A log-prob worker in float32 beside a server in float16: they cannot share a broadcast."""
    server, scorer = member("server", HALVES), member("scorer", WHOLES)
    assert Stand(server, scorer).left_s(server) == 0.0


def test_one_on_the_same_gpu_is_not_awaited() -> None:
    """NCCL has one rank of a group on each GPU."""
    server, scorer = member("server", gpu="A"), member("scorer", gpu="A")
    assert Stand(server, scorer).left_s(server) == 0.0


def test_one_whose_layout_does_not_match_is_not_awaited() -> None:
    """It will be refused."""
    server, broken = member("server"), member("broken")
    broken.layout = json.dumps([["w", WHOLES, [4, 3]]])
    assert Stand(server, broken).left_s(server) == 0.0


def test_one_that_has_asked_is_awaited_for_what_another_broadcast_would_take() -> None:
    """Forming a group and sending, as the last ones took; a group that stood changes only one."""
    early, late = member("early"), member("late")
    stand = Stand(early, late, window_s=0.0)
    stand.window.took(0.75 * PATIENCE_S, 0.125 * PATIENCE_S)
    stand.window.took(None, 0.0625 * PATIENCE_S)
    assert stand.left_s(early) <= 0.0  # it may not come at all
    stand.membership.ask(LoggedRequest("late", VERSION, "rollout-1"))
    before_s = time.monotonic()
    left_s = stand.left_s(early)
    longest_s = 0.8125 * PATIENCE_S
    assert longest_s - (time.monotonic() - before_s) <= left_s <= longest_s


def test_patience_ends() -> None:
    """One that asked and hangs does not stop the others for as long as a slow transfer takes."""
    early, late = member("early"), member("late")
    stand = Stand(early, late, window_s=0.0)
    stand.window.took(1000.0, 1000.0)
    stand.membership.ask(LoggedRequest("late", VERSION, "rollout-1"))
    assert stand.left_s(early) <= PATIENCE_S
