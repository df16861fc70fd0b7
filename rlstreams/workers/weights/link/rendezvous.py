"""Rendezvous of a group: torch's key-value store, kept by the sender, reached over proven links.

It holds NCCL's id and gloo's addresses, nothing else. No `TCPStore`: that answers any client.
"""

from __future__ import annotations

import threading
from datetime import timedelta

from torch._C._distributed_c10d import HashStore, Store

from .errors import PullError
from .frames import Connection, Frame


def answer(store: HashStore, request: Frame) -> Frame:
    """The sender's side: answer a member's request to the group's store over its link.

    Raises:
        PullError: a key that no member wrote in time.
    """
    key = str(request["key"])
    try:
        if request["type"] == "get":
            return {"type": "value", "value": store.get(key).hex()}
        store.set(key, bytes.fromhex(request["value"]))  # type: ignore[arg-type]  # bytes do
    except RuntimeError as err:
        raise PullError("link", f"nobody wrote {key!r} in time: {err}") from err
    return {"type": "done"}


class LinkStore(Store):
    """A receiver's end: the part of torch's store that both transports use; a call is a request."""

    def __init__(self, connection: Connection, until_s: float) -> None:
        super().__init__()
        self._connection = connection
        self._until_s = until_s
        self._one = threading.Lock()

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override]  # torch gives bytes
        """Write a value."""
        self._ask({"type": "set", "key": key, "value": bytes(value).hex()})

    def get(self, key: str) -> bytes:
        """Wait for a value and read it."""
        return bytes.fromhex(self._ask({"type": "get", "key": key})["value"])

    def check(self, keys: list[str]) -> bool:
        """Always false: torch's monitor asks for a flag that no member sets."""
        return False

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys are there."""
        for key in keys:
            self.get(key)

    def _ask(self, request: Frame) -> Frame:
        with self._one:
            self._connection.send(request)
            return self._connection.receive(self._until_s)
