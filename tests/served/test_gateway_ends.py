"""How a gateway begins and ends: what is under way is answered, or told when to come again."""

from __future__ import annotations

import json
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
