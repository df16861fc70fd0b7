"""How a gateway begins and ends: what is under way is answered, or told when to come again."""

from __future__ import annotations

import json
import socket
import time
from urllib.parse import urlsplit

import pytest

from tests.gateways import DEADLINE_S, connected, gateway, head

USER = [{"role": "user", "content": "a"}]


def test_the_end_waits_for_what_is_under_way_and_no_longer() -> None:
    """One call ends within the deadline and is answered; one that does not is cut, and its client
    is told when to come again."""
    body = json.dumps({"messages": USER}).encode()
    for deadline_s, cut in ((DEADLINE_S, 0), (0.2, 2)):
        with gateway() as made, connected(made) as peer:
            made.hold()
            peer.sendall(head(made, f"content-length: {len(body)}") + body)
            while not made.calls.requests:
                time.sleep(0.01)
            ending = made.thread.submit(made.server.close(deadline_s))
            time.sleep(0.1)
            if not cut:
                made.hold(False)
            assert bool(ending.result(DEADLINE_S)) == bool(cut)
            answer = peer.recv(4096)
            assert (b" 503 " if cut else b" 200 ") in answer.splitlines()[0]
            assert (b"retry-after: 5" in answer) == bool(cut)
        with pytest.raises(OSError, match="refused"):
            connected(made)


def test_a_stream_that_is_cut_says_so() -> None:
    """Its status line is gone, so the last event names it; no stream ends as if it were whole."""
    body = json.dumps({"messages": USER, "stream": True}).encode()
    with gateway(keepalive_s=0.05) as made, connected(made) as peer:
        made.hold()
        peer.sendall(head(made, f"content-length: {len(body)}") + body)
        answer = b""
        while b": waiting" not in answer:
            answer += peer.recv(4096)
        assert made.thread.submit(made.server.close(0.0)).result(DEADLINE_S)
        while more := peer.recv(4096):
            answer += more
    assert b'"code":"ending"' in answer


def test_an_address_in_use_is_named() -> None:
    with gateway() as made:
        port = urlsplit(made.url).port
        with (
            pytest.raises(OSError, match=rf"127\.0\.0\.1:{port}: Address already in use"),
            gateway(port=port),
        ):
            pass


ENDLESS = {  # what is sent again and again behind what begins it
    "headers": (b"POST /v1/messages HTTP/1.1\r\n", b"a: b\r\n" * 400),
    "one header": (b"POST /v1/messages HTTP/1.1\r\na: ", b"b" * 2000),
    "line": (b"", b"P" * 2000),
    "path": (b"POST /v1/", b"m" * 2000),
    "trailers": (
        b"POST /v1/messages HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n1\r\nx\r\n0\r\n",
        b"a: b\r\n" * 400,
    ),
}


@pytest.mark.parametrize("what", ENDLESS)
def test_headers_without_end_are_read_no_further(what: str) -> None:
    """They come before a key: nobody is to fill our memory with them. Their connection is closed;
    the next one is answered."""
    begin, piece = ENDLESS[what]
    with gateway() as running:
        with connected(running) as peer:
            peer.settimeout(DEADLINE_S)
            peer.sendall(begin)
            with pytest.raises(ConnectionError):
                _send_for_ever(peer, piece)
        with connected(running) as peer:
            peer.settimeout(DEADLINE_S)
            peer.sendall(head(running, "content-length: 2") + b"{}")
            assert b" 400 " in peer.recv(1000).splitlines()[0]


def _send_for_ever(peer: socket.socket, piece: bytes) -> None:
    for _ in range(500):  # 1 MB
        peer.sendall(piece)
        time.sleep(0.001)
