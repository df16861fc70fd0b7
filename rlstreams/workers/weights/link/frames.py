"""JSON frames over a socket: a 4-byte big-endian length, then the text. Every wait has an end."""

from __future__ import annotations

import contextlib
import json
import select
import socket
import struct
import threading
import time
from typing import Any

from .errors import PullError

Frame = dict[str, Any]

UNPROVEN_BYTES = 4096
PROVEN_BYTES = 64 * 2**20
SEND_S = 10.0
_LONGEST_POLL_S = 60.0
_LENGTH = struct.Struct(">I")


def dial(address: str, until_s: float) -> Connection:
    """Connect to `host:port`.

    Raises:
        PullError: no listener answers there.
    """
    host, _, port = address.rpartition(":")
    try:
        left_s = max(0.01, until_s - time.monotonic())
        return Connection(socket.create_connection((host.strip("[]"), int(port)), left_s), address)
    except (OSError, ValueError) as err:
        raise PullError("link", f"cannot connect to {address}: {err}") from err


class Connection:
    """One end. Reads belong to one thread; sends may come from several."""

    def __init__(self, sock: socket.socket, peer: str) -> None:
        sock.settimeout(SEND_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._socket = sock
        self._inbox = bytearray()
        self._limit = UNPROVEN_BYTES
        self._sending = threading.Lock()
        self.peer = peer

    def trust(self) -> None:
        """Let the peer send long frames, now that it is proven."""
        self._limit = PROVEN_BYTES

    @property
    def local_host(self) -> str:
        """Our address that the peer is connected to."""
        return str(self._socket.getsockname()[0])

    def send(self, frame: Frame) -> None:
        """Send one frame.

        Raises:
            PullError: the link is closed, or the peer takes nothing for `SEND_S`.
        """
        text = json.dumps(frame, separators=(",", ":")).encode()
        try:
            with self._sending:
                self._socket.sendall(_LENGTH.pack(len(text)) + text)
        except OSError as err:
            raise PullError("link", f"{self.peer} takes no {frame.get('type')!r}: {err}") from err

    def receive(self, until_s: float) -> Frame:
        """The next frame.

        Raises:
            PullError: `deadline`; `link` if the link is closed or carries no frame.
        """
        while (frame := self._take()) is None:
            left_s = until_s - time.monotonic()
            if left_s <= 0:
                raise PullError("deadline", f"{self.peer} has not answered in time")
            self._read(left_s)
        return frame

    def poll(self) -> Frame | None:
        """A frame that has arrived already, or None."""
        frame = self._take()
        if frame is None:
            self._read(0.0)
            frame = self._take()
        return frame

    def detach(self) -> socket.socket:
        """The socket, blocking, for use without frames."""
        self._socket.settimeout(None)
        return self._socket

    def close(self) -> None:
        """Close the link, and wake a thread that reads; idempotent."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _read(self, wait_s: float) -> None:
        # poll, not select: a model server has more than 1024 files open.
        poller = select.poll()
        try:
            poller.register(self._socket, select.POLLIN)
            if not poller.poll(1000 * min(wait_s, _LONGEST_POLL_S)):
                return
            chunk = self._socket.recv(2**20)
        except (OSError, ValueError) as err:
            raise PullError("link", f"{self.peer} broke off: {err}") from err
        if not chunk:
            raise PullError("link", f"{self.peer} closed the link")
        self._inbox += chunk

    def _take(self) -> Frame | None:
        if len(self._inbox) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._inbox)
        if length > self._limit:
            raise PullError("link", f"{self.peer} sends a frame of {length} bytes")
        end = _LENGTH.size + length
        if len(self._inbox) < end:
            return None
        text = bytes(self._inbox[_LENGTH.size : end])
        del self._inbox[:end]
        try:
            frame = json.loads(text)
        except (ValueError, RecursionError) as err:
            raise PullError("link", f"{self.peer} sends no JSON: {err}") from err
        if not isinstance(frame, dict):
            raise PullError("link", f"{self.peer} sends no object")
        return frame
