"""Who is let in: only who knows the key, is of the epoch, and speaks in frames."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from rlstreams.workers.weights.link import PROTOCOL
from rlstreams.workers.weights.link.errors import PullError
from rlstreams.workers.weights.link.frames import Connection
from rlstreams.workers.weights.link.handshake import Hello, admit, introduce, receiver_key

SECRET, EPOCH, WAIT_S = "the run's", 4, 5.0
HELLO = Hello(receiver="a1b2.0", rank=0, epoch=EPOCH, purpose="member")


def links() -> tuple[Connection, Connection]:
    """The trainer's end, and the receiver's."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        theirs = socket.create_connection(listening.getsockname())
        ours, _ = listening.accept()
    return Connection(ours, "10.0.0.7:1"), Connection(theirs, "trainer")


def meet(client: Callable[[Connection], None]) -> tuple[Future[Hello], Future[None]]:
    server, other = links()
    with ThreadPoolExecutor(2) as pool:
        until_s = time.monotonic() + WAIT_S
        admitted = pool.submit(admit, server, EPOCH, lambda r: receiver_key(SECRET, r), until_s)
        introduced = pool.submit(client, other)
        for future in (admitted, introduced):
            future.exception(WAIT_S + 1)
    server.close()
    other.close()
    return admitted, introduced


def introducing(hello: Hello, key: str) -> Callable[[Connection], None]:
    return lambda link: introduce(link, hello, key, time.monotonic() + WAIT_S)


@pytest.mark.parametrize(
    ("hello", "key_of", "reason"),
    [
        (HELLO, ("another secret", "a1b2.0"), "give both hosts one weights.secret"),
        (HELLO, (SECRET, "somebody else"), "the secret is not this run's"),
        (
            Hello(receiver="a1b2.0", rank=0, epoch=3, purpose="member"),
            (SECRET, "a1b2.0"),
            "epoch 3 announced what it wants, this trainer is 4",
        ),
    ],
)
def test_others_are_refused_and_told_why(
    hello: Hello, key_of: tuple[str, str], reason: str
) -> None:
    """A wrong secret, the key of another receiver, an epoch that is over."""
    admitted, introduced = meet(introducing(hello, receiver_key(*key_of)))
    for future in (admitted, introduced):
        error = future.exception()
        assert isinstance(error, PullError)
        assert (error.kind, reason in str(error)) == ("refused", True)


def test_a_trainer_that_does_not_know_the_key_is_refused() -> None:
    """Weights are taken from the run's trainer only, not from who listens at its address."""
    key = receiver_key(SECRET, "a1b2.0")
    server, client = links()

    def answer() -> None:
        server.send({"rlstreams": PROTOCOL, "nonce": "00"})
        server.receive(time.monotonic() + WAIT_S)
        server.send({"type": "admitted", "proof": "00"})

    thread = threading.Thread(target=answer)
    thread.start()
    with pytest.raises(PullError, match="does not know the key"):
        introduce(client, HELLO, key, time.monotonic() + WAIT_S)
    thread.join()
    server.close()
    client.close()


def test_a_silent_peer_is_not_waited_for() -> None:
    """The handshake has a deadline, which names the peer."""
    server, client = links()
    with pytest.raises(PullError, match=r"10.0.0.7:1 has not answered") as caught:
        admit(server, EPOCH, lambda r: r, time.monotonic() + 0.05)
    assert caught.value.kind == "deadline"
    server.close()
    client.close()
