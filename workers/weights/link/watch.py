"""Waiting that hears: between looks at the device, a look at the link and at the clock."""

from __future__ import annotations

import time
from collections.abc import Callable

from .errors import PullError
from .frames import Connection

LOOK_EVERY_S = 0.0002


class AbortedError(Exception):
    """The sender gave the group up; there may be another one."""


class Watch:
    """Of one transfer at the receiver."""

    def __init__(self, link: Connection, group_id: str, until_s: float) -> None:
        self._link = link
        self._group_id = group_id
        self._until_s = until_s
        self.sent: str | None = None  # the sender's checksum

    def look(self) -> None:
        """Once.

        Raises:
            AbortedError: the sender said so.
            PullError: the sender is gone, or the time is up.
        """
        frame = self._link.poll()
        if frame is not None and frame.get("group") == self._group_id:
            if frame["type"] == "abort":
                raise AbortedError(str(frame["error"]))
            if frame["type"] == "sent":
                self.sent = str(frame["checksum"])
        if time.monotonic() > self._until_s:
            raise PullError("deadline", f"{self._link.peer} did not send all in time")

    def until(self, done: Callable[[], bool]) -> None:
        """Until `done()`; see `look` for what ends it before."""
        while not done():
            self.look()
            time.sleep(LOOK_EVERY_S)
