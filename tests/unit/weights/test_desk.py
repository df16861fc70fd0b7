"""The desk believes those who prove the key of an order, and of what they say only what fits it."""

from __future__ import annotations

import json
import socket
import struct
import time
from collections.abc import Iterator
from typing import Any

import pytest

from workers.weights import desk as module
from workers.weights.desk import Desk, Errand, ServerPullError, describe
from workers.weights.link.errors import PullError
from workers.weights.link.frames import dial
from workers.weights.link.trust import Hello, introduce

LONG_S = 60.0
ORDER = {"deadline_s": LONG_S, "policy_version": 7, "weight_hash": "ab"}
DONE = {"ok": True, "policy_version": 7, "weight_hash": "ab", "num_bytes": 10}


@pytest.fixture
def desk() -> Iterator[Desk]:
    made = Desk()
    yield made
    made.close()


def tell(
    errand: Errand, report: object, *, rank: int = 0, key: str = "", epoch: int = 0, of: str = ""
) -> None:
    """What a rank of the server does with the order's text."""
    order: dict[str, Any] = json.loads(errand.text)
    until_s = time.monotonic() + LONG_S
    link = dial(order["report_to"], until_s)
    hello = Hello(receiver=of or order["order"], rank=rank, epoch=epoch, purpose="report")
    try:
        introduce(link, hello, key or order["report_key"], until_s)
        link.send({"type": "report", "report": report})
        with pytest.raises(PullError):  # it hangs up once it has heard
            link.receive(until_s)
    finally:
        link.close()


def test_an_errand_ends_when_every_rank_has_reported(desk: Desk) -> None:
    """Bytes are summed; who is who does not depend on the order in which they come."""
    with desk.open(ORDER, ranks=2) as errand:
        tell(errand, DONE, rank=1)
        tell(errand, DONE | {"num_bytes": 32}, rank=0)
        pulled = errand.wait()
    assert (7, "ab", 42) == (pulled.policy_version, pulled.weight_hash, pulled.num_bytes)


def test_a_description_is_handed_over_by_rank(desk: Desk) -> None:
    """It is about no version."""
    with desk.open(describe(), kind="describe", ranks=1) as errand:
        tell(errand, {"ok": True, "engine": "vllm 0.25.1"})
        assert ["vllm 0.25.1"] == [report["engine"] for report in errand.reports()]


def test_who_does_not_know_the_key_is_refused(desk: Desk) -> None:
    """Another order's key opens nothing, and the errand goes on."""
    with desk.open(ORDER, ranks=1) as errand, desk.open(ORDER, ranks=1) as other:
        with pytest.raises(PullError, match="the secret is not this run's"):
            tell(errand, DONE, key=other.key)
        with pytest.raises(PullError, match="no hello"):
            tell(errand, DONE, of="nobody")
        tell(errand, DONE)
        assert 7 == errand.wait().policy_version


def test_a_report_belongs_to_no_epoch(desk: Desk) -> None:
    """A receiver that speaks as a member of the trainer's epoch took the wrong door."""
    with desk.open(ORDER, ranks=1) as errand, pytest.raises(PullError, match="epoch 4 announced"):
        tell(errand, DONE, epoch=4)


def test_an_order_that_is_over_is_no_longer_answered(desk: Desk) -> None:
    """A late report of a server that was given up changes nothing."""
    with desk.open(ORDER, ranks=1) as errand:
        pass
    with pytest.raises(PullError, match="no hello"):
        tell(errand, DONE)


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
def test_what_does_not_fit_the_order_is_no_pull(desk: Desk, report: object, what: str) -> None:
    """Not an object, nothing said, a failure, another version or content."""
    with desk.open(ORDER, ranks=1) as errand:
        tell(errand, report)
        with pytest.raises(ServerPullError, match=what):
            errand.wait()


def test_damage_to_one_rank_is_damage(desk: Desk) -> None:
    """The gate stays shut even if the rank that failed touched nothing."""
    with desk.open(ORDER, ranks=2) as errand:
        tell(errand, {"ok": False, "kind": "link", "error": "cut", "touched": False}, rank=0)
        tell(errand, DONE | {"touched": True}, rank=1)
        with pytest.raises(ServerPullError, match="rank 0 of 2: cut") as caught:
            errand.wait()
    assert (True, "link") == (caught.value.touched, caught.value.kind)


def test_a_rank_that_the_server_has_not_is_nobody(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that are missing at the deadline are named."""
    monkeypatch.setattr(module, "REPORT_GRACE_S", 0.05)
    with desk.open(ORDER | {"deadline_s": 0.0}, ranks=2) as errand:
        tell(errand, DONE, rank=5)
        tell(errand, DONE, rank=1)
        with pytest.raises(ServerPullError, match=r"ranks \[0\] of 2 did not report") as caught:
            errand.wait()
    assert (True, "unreported") == (caught.value.touched, caught.value.kind)


def test_a_server_that_died_is_given_up(desk: Desk) -> None:
    """For the ranks that said nothing; what was said before stays."""
    with desk.open(ORDER, ranks=2) as errand:
        tell(errand, DONE, rank=0)
        errand.give_up("connection failed")
        with pytest.raises(ServerPullError, match="rank 1 of 2: connection failed"):
            errand.wait()


@pytest.mark.parametrize(
    "sent",
    [
        b"\x00\x00\x00\x02[]",
        struct.pack(">I", 1 << 30),
        struct.pack(">I", 4000) + b"[" * 4000,
        b"\x00\x00\x00\x0d" + b'{"proof":"x"}',
        struct.pack(">I", 35) + '{"hello":[],"proof":"\u00fc","nonce":1}'.encode()[:35],
    ],
)
def test_noise_is_hung_up_on(desk: Desk, sent: bytes) -> None:
    """No object, too long, nested beyond reading, no hello; and the next one is served."""
    host, _, port = desk.address.rpartition(":")
    with socket.create_connection((host, int(port)), LONG_S) as sock:
        sock.sendall(sent)
        while sock.recv(4096):
            pass  # its challenge, perhaps a refusal, then the end
    with desk.open(ORDER, ranks=1) as errand:
        tell(errand, DONE)
        assert 10 == errand.wait().num_bytes


def test_a_proof_in_any_letters_is_a_wrong_one(desk: Desk) -> None:
    """A stranger's text never reaches what compares keys in a form that it cannot take."""
    with desk.open(ORDER, ranks=1) as errand:
        until_s = time.monotonic() + LONG_S
        link = dial(desk.address, until_s)
        nonce = link.receive(until_s)["nonce"]
        hello = {"receiver": errand.order_id, "rank": 0, "epoch": 0, "purpose": "report"}
        link.send({"hello": hello, "nonce": "n", "challenge": nonce, "proof": "\u00fc\ud800"})
        assert "the secret is not this run's" in link.receive(until_s)["error"]
        link.close()


def test_a_closed_desk_hears_nobody() -> None:
    """Closing twice is closing once."""
    desk = Desk()
    errand = desk.open(ORDER, ranks=1)
    desk.close()
    desk.close()
    with pytest.raises(PullError, match="cannot connect"):
        tell(errand, DONE)
