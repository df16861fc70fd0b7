"""Named points at which a test makes a process crash, stall or fail; otherwise they do nothing.

There is a crash point before and after each call whose timing matters: poll, forward, begin, send,
offsets, commit, checkpoint write and rename. `reach` costs one comparison unless armed.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from enum import StrEnum

from rlstreams.streams.log.errors import ConfigError

VARIABLE = "RLSTREAMS_CRASH_AT"  # "POINT[:COUNT[:ACTION[:SECONDS]]]"; COUNT from 1


class CrashPoint(StrEnum):
    """Every crash point, in the order in which a transaction reaches them."""

    POLL_BEFORE = "poll.before"
    POLL_AFTER = "poll.after"
    FORWARD_BEFORE = "forward.before"
    FORWARD_AFTER = "forward.after"
    BEGIN_BEFORE = "begin.before"
    BEGIN_AFTER = "begin.after"
    SEND_AFTER = "send.after"  # all records handed to the client; "begin.after" is before them
    OFFSETS_BEFORE = "offsets.before"
    OFFSETS_AFTER = "offsets.after"
    COMMIT_BEFORE = "commit.before"
    COMMIT_AFTER = "commit.after"
    CHECKPOINT_BEFORE = "checkpoint.before"
    CHECKPOINT_WRITTEN = "checkpoint.written"  # before the rename
    CHECKPOINT_AFTER = "checkpoint.after"


Hook = Callable[[CrashPoint], None]
_hook: Hook | None = None


def reach(point: CrashPoint) -> None:
    """Announce that the process is at `point`."""
    if _hook is not None:
        _hook(point)


def arm(hook: Hook | None) -> None:
    """Call `hook` at every point from now on; None disarms. Its exceptions pass through."""
    global _hook  # noqa: PLW0603  (one process dies once)
    _hook = hook


def arm_from(text: str) -> None:
    """Arm as `text` says: `"commit.before"`, `"send.after:3"`, `"poll.after:2:stop:12"`.

    At the COUNT-th time `kill` (default) sends this process SIGKILL; `stop` sleeps SECONDS.

    Raises:
        ConfigError: no such point or action.
    """
    name, _, rest = text.partition(":")
    count, _, rest = rest.partition(":")
    action, _, seconds = rest.partition(":")
    if name not in set(CrashPoint) or action not in ("", "kill", "stop"):
        points = ", ".join(CrashPoint)
        raise ConfigError(f"{VARIABLE} is {text!r}; points: {points}; actions: kill, stop")
    try:
        left, pause_s = int(count or 1), float(seconds or 12)
    except ValueError as err:
        raise ConfigError(f"{VARIABLE} is {text!r}: {err}") from err

    def hook(point: CrashPoint) -> None:
        nonlocal left
        if point != name:
            return
        left -= 1
        if left == 0 and action == "stop":
            time.sleep(pause_s)
        elif left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    arm(hook)
