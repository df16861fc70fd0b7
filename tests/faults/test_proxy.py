"""The proxy itself, between a client and a server that answers what it hears."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from tests.faults.proxy import HOST, FaultProxy, Weather

DEADLINE_S = 60.0


class Echo:
    """Answers each connection with what it says, from threads of its own."""

    def __init__(self) -> None:
        self._listener = socket.create_server((HOST, 0))
        self.port: int = self._listener.getsockname()[1]
        self.heard = b""
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        with connection:
            while data := _received(connection):
                self.heard += data
                connection.sendall(data)
            try:
                connection.sendall(b"bye")
            except OSError:
                return  # cut

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


def _received(connection: socket.socket) -> bytes:
    try:
        return connection.recv(65_536)
    except ConnectionError:
        return b""


@pytest.fixture
def echo() -> Iterator[Echo]:
    server = Echo()
    yield server
    server.close()


@pytest.fixture
def proxy(echo: Echo) -> Iterator[FaultProxy]:
    with FaultProxy(echo.port) as between:
        yield between


@pytest.fixture
def client(proxy: FaultProxy) -> Iterator[socket.socket]:
    with socket.create_connection((HOST, proxy.port), DEADLINE_S) as connection:
        yield connection


def answer(client: socket.socket, num_bytes: int) -> bytes:
    found = b""
    while len(found) < num_bytes and (data := client.recv(65_536)):
        found += data
    return found


def test_a_cut_resets_living_connections_and_new_ones_pass(
    client: socket.socket, proxy: FaultProxy
) -> None:
    """The peer sees a reset; who connects again is served."""
    client.sendall(b"x")
    answer(client, 1)
    proxy.cut()

    with pytest.raises(ConnectionResetError):
        client.recv(1)
    assert 1 == proxy.num_cut
    with socket.create_connection((HOST, proxy.port), DEADLINE_S) as again:
        again.sendall(b"y")
        assert b"y" == answer(again, 1)


def test_a_black_hole_takes_connections_and_bytes_and_says_nothing(
    client: socket.socket, proxy: FaultProxy, echo: Echo
) -> None:
    """No answer and no error; when it is calm again those connections are gone."""
    proxy.hurt(Weather(swallow=True))
    client.settimeout(0.1)
    with socket.create_connection((HOST, proxy.port), DEADLINE_S) as late:
        late.sendall(b"x")
        client.sendall(b"x")
        with pytest.raises(TimeoutError):
            client.recv(1)
    assert b"" == echo.heard

    proxy.calm()
    with pytest.raises(ConnectionResetError):
        client.recv(1)


@pytest.mark.parametrize(("after", "heard"), [(False, b"one"), (True, b"onetwo")])
def test_a_trigger_cuts_before_or_after_the_server_hears(
    client: socket.socket, proxy: FaultProxy, echo: Echo, after: bool, heard: bytes
) -> None:
    """The same request is lost, or its answer is; then the trigger is spent."""
    proxy.cut_at(lambda data: data == b"two", after=after)
    client.sendall(b"one")
    assert b"one" == answer(client, 3)
    assert proxy.is_armed
    client.sendall(b"two")

    with pytest.raises(ConnectionResetError):
        client.recv(1)
    assert heard == echo.heard
    assert not proxy.is_armed
