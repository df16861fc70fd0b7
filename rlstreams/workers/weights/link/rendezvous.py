"""How a group finds itself: torch's key-value store, kept by the sender, reached over proven links.

NCCL's id and gloo's addresses are all that is in it. No `TCPStore`: that one answers anybody.
"""

from __future__ import annotations

import threading
from datetime import timedelta

from torch._C._distributed_c10d import HashStore, Store

from .errors import PullError
from .frames import Connection, Frame


def answer(store: HashStore, request: Frame) -> Frame:
    """The sender's side: what a member asked of the group's store over its link.

    Raises:
        PullError: a key that nobody wrote in time.
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
    """A receiver's: the part of torch's store that both transports use, each call one request."""

    def __init__(self, connection: Connection, until_s: float) -> None:
        super().__init__()
        self._connection = connection
        self._until_s = until_s
        self._one = threading.Lock()

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override]  # torch gives bytes
        """Write."""
        self._ask({"type": "set", "key": key, "value": bytes(value).hex()})

    def get(self, key: str) -> bytes:
        """Wait and read."""
        return bytes.fromhex(self._ask({"type": "get", "key": key})["value"])

    def check(self, keys: list[str]) -> bool:
        """Whether all are there: asked by torch's monitor for a flag that nobody here sets."""
        return False

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Until all are there."""
        for key in keys:
            self.get(key)

    def _ask(self, request: Frame) -> Frame:
        with self._one:
            self._connection.send(request)
            return self._connection.receive(self._until_s)
