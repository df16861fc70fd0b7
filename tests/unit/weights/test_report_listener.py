"""Reports count from those who prove the key of an order, and as far as they fit it."""

from __future__ import annotations

import json
import socket
import struct
import time
from collections.abc import Iterator
from typing import Any

import pytest

from rlstreams.workers.weights import report_listener as module
from rlstreams.workers.weights.link.errors import PullError
from rlstreams.workers.weights.link.frames import UNPROVEN_BYTES, dial
from rlstreams.workers.weights.link.handshake import Hello, introduce
from rlstreams.workers.weights.report_listener import (
    PendingOrder,
    ReportListener,
    ServerPullError,
)

LONG_S = 60.0
ORDER = {"deadline_s": LONG_S, "policy_version": 7, "weight_hash": "ab"}
DONE = {"ok": True, "policy_version": 7, "weight_hash": "ab", "num_bytes": 10}


@pytest.fixture
def listener() -> Iterator[ReportListener]:
    made = ReportListener()
    yield made
    made.close()


def tell(
    pending: PendingOrder,
    report: object,
    *,
    rank: int = 0,
    key: str = "",
    of: str = "",
) -> None:
    """What a rank of the server does with the order's text."""
    order: dict[str, Any] = json.loads(pending.text)
    until_s = time.monotonic() + LONG_S
    link = dial(order["report_to"], until_s)
    hello = Hello(receiver=of or order["order"], rank=rank, epoch=0, purpose="report")
    try:
        introduce(link, hello, key or order["report_key"], until_s)
        link.send({"type": "report", "report": report})
        with pytest.raises(PullError):  # it hangs up once it has heard
            link.receive(until_s)
    finally:
        link.close()


def test_a_pending_order_ends_when_every_rank_has_reported(listener: ReportListener) -> None:
    """Bytes are summed; who is who does not depend on the order in which they come."""
    with listener.open(ORDER, ranks=2) as pending:
        tell(pending, DONE, rank=1)
        tell(pending, DONE | {"num_bytes": 32}, rank=0)
        pulled = pending.wait()
    assert (7, "ab", 42) == (pulled.policy_version, pulled.weight_hash, pulled.num_bytes)


def test_who_does_not_know_the_key_is_refused(listener: ReportListener) -> None:
    """Another order's key opens nothing, and the order stays pending."""
    with listener.open(ORDER, ranks=1) as pending, listener.open(ORDER, ranks=1) as other:
        with pytest.raises(PullError, match="the secret is not this run's"):
            tell(pending, DONE, key=other.key)
        with pytest.raises(PullError, match="no hello"):
            tell(pending, DONE, of="nobody")
        tell(pending, DONE)
        assert 7 == pending.wait().policy_version


@pytest.mark.parametrize(
    ("report", "what"),
    [
        (["ok"], r"it reports \['ok'\]"),
        (None, "it reports None"),
        ({}, "rank 0 of 1: None"),
        ({"ok": False, "kind": "checksum", "error": "other bytes"}, "other bytes"),
        ({"ok": True}, "ordered was"),
        (DONE | {"policy_version": 6}, r"reports .*'policy_version': 6.*ordered was .*7"),
        (DONE | {"weight_hash": "cd"}, "'weight_hash': 'cd'"),
    ],
)
def test_what_does_not_fit_the_order_is_no_pull(
    listener: ReportListener, report: object, what: str
) -> None:
    """Not an object, nothing said, a failure, another version or content."""
    with listener.open(ORDER, ranks=1) as pending:
        tell(pending, report)
        with pytest.raises(ServerPullError, match=what):
            pending.wait()


def test_damage_to_one_rank_is_damage(listener: ReportListener) -> None:
    """The gate stays shut even if the rank that failed touched nothing."""
    with listener.open(ORDER, ranks=2) as pending:
        tell(pending, {"ok": False, "kind": "link", "error": "cut", "touched": False}, rank=0)
        tell(pending, DONE | {"touched": True}, rank=1)
        with pytest.raises(ServerPullError, match="rank 0 of 2: cut") as caught:
            pending.wait()
    assert (True, "link") == (caught.value.touched, caught.value.kind)


def test_a_rank_that_the_server_has_not_is_nobody(
    listener: ReportListener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that are missing at the deadline are named."""
    monkeypatch.setattr(module, "REPORT_GRACE_S", 0.05)
    with listener.open(ORDER | {"deadline_s": 0.0}, ranks=2) as pending:
        tell(pending, DONE, rank=5)
        tell(pending, DONE, rank=1)
        with pytest.raises(ServerPullError, match=r"ranks \[0\] of 2 did not report") as caught:
            pending.wait()
    assert (True, "unreported") == (caught.value.touched, caught.value.kind)


def test_a_server_that_died_is_given_up(listener: ReportListener) -> None:
    """For the ranks that said nothing; what was said before stays."""
    with listener.open(ORDER, ranks=2) as pending:
        tell(pending, DONE, rank=0)
        pending.give_up("connection failed")
        with pytest.raises(ServerPullError, match="rank 1 of 2: connection failed"):
            pending.wait()


@pytest.mark.parametrize(
    "sent",
    [
        b"\x00\x00\x00\x02[]",
        b"\x00\x00\x00\x03{{{",
        struct.pack(">I", UNPROVEN_BYTES + 1),
        struct.pack(">I", 4000) + b"[" * 4000,
        b"\x00\x00\x00\x0d" + b'{"proof":"x"}',
        struct.pack(">I", 35) + '{"hello":[],"proof":"\u00fc","nonce":1}'.encode()[:35],
    ],
)
def test_noise_is_hung_up_on(listener: ReportListener, sent: bytes) -> None:
    """No object, too long, nested beyond reading, no hello; and the next one is served."""
    host, _, port = listener.address.rpartition(":")
    with socket.create_connection((host, int(port)), LONG_S) as sock:
        sock.sendall(sent)
        while sock.recv(4096):
            pass  # its challenge, perhaps a refusal, then the end
    with listener.open(ORDER, ranks=1) as pending:
        tell(pending, DONE)
        assert 10 == pending.wait().num_bytes


def test_a_proof_in_any_letters_is_a_wrong_one(listener: ReportListener) -> None:
    """A stranger's text never reaches what compares keys in a form that it cannot take."""
    with listener.open(ORDER, ranks=1) as pending:
        until_s = time.monotonic() + LONG_S
        link = dial(listener.address, until_s)
        nonce = link.receive(until_s)["nonce"]
        hello = {"receiver": pending.order_id, "rank": 0, "epoch": 0, "purpose": "report"}
        link.send({"hello": hello, "nonce": "n", "challenge": nonce, "proof": "\u00fc\ud800"})
        assert "the secret is not this run's" in link.receive(until_s)["error"]
        link.close()
