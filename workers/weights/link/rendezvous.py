"""How a group finds itself: torch's key-value store, kept by the sender, reached over proven links.

NCCL's id and gloo's addresses are all that is in it. No `TCPStore`: that one answers anybody.
"""

from __future__ import annotations

import threading
import time
from datetime import timedelta

from torch._C._distributed_c10d import Store

from .errors import PullError
from .frames import Connection, Frame


class KeyValueStore:
    """The keys and values of one group, at the sender. Closing it fails everyone who waits."""

    def __init__(self, until_s: float) -> None:
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()
        self._until_s = until_s
        self._closed = ""

    def set(self, key: str, value: bytes) -> None:
        """Write."""
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()

    def get(self, key: str) -> bytes:
        """Wait for a key and read it.

        Raises:
            PullError: it did not come, or the group was given up.
        """
        with self._changed:
            while key not in self._values:
                left_s = self._until_s - time.monotonic()
                if self._closed or left_s <= 0:
                    raise PullError("link", self._closed or f"nobody wrote {key!r} in time")
                self._changed.wait(left_s)
            return self._values[key]

    def close(self, reason: str) -> None:
        """The group was given up."""
        with self._changed:
            self._closed = reason
            self._changed.notify_all()

    def answer(self, request: Frame) -> Frame:
        """What a member asked over its link."""
        key = str(request["key"])
        if request["type"] == "set":
            self.set(key, bytes.fromhex(request["value"]))
            return {"type": "done"}
        return {"type": "value", "value": self.get(key).hex()}


class _Store(Store):
    """The part of torch's store that both transports use, over `set` and `get`."""

    def check(self, keys: list[str]) -> bool:
        """Whether all are there: asked by torch's monitor for a flag that nobody here sets."""
        return False

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Until all are there."""
        for key in keys:
            self.get(key)


class LocalStore(_Store):
    """The sender's own."""

    def __init__(self, values: KeyValueStore) -> None:
        super().__init__()
        self._values = values

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override]  # torch gives bytes
        """Write."""
        self._values.set(key, bytes(value))

    def get(self, key: str) -> bytes:
        """Wait and read."""
        return self._values.get(key)


class LinkStore(_Store):
    """A receiver's: each call is one request over a link of its own."""

    def __init__(self, connection: Connection, until_s: float) -> None:
        super().__init__()
        self._connection = connection
        self._until_s = until_s
        self._one = threading.Lock()

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override]
        """Write."""
        self._ask({"type": "set", "key": key, "value": bytes(value).hex()})

    def get(self, key: str) -> bytes:
        """Wait and read."""
        return bytes.fromhex(self._ask({"type": "get", "key": key})["value"])

    def _ask(self, request: Frame) -> Frame:
        with self._one:
            self._connection.send(request)
            return self._connection.receive(self._until_s)
