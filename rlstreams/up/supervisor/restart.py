"""What to do about a worker that ended: pure.

Statuses are those of `workers.loop.runtime.Exit`, as infra/docs/operating.md explains them to any
supervisor; a negative one is the signal that killed the process.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from rlstreams.workers.loop.runtime import Exit

FENCED_PAUSE_S = 3.0
FENCED_WINDOW_S = 600.0
QUICK_LIMIT = 3
BACK_OFF_S = 0.5  # doubles with every death in a row that nothing was committed before
LONGEST_BACK_OFF_S = 15.0
OWNER_S = 60.0  # for a trainer of an `up` that was killed to drain
# What the kernel sends a process for its own mistake; any other signal comes from somebody else.
_OWN_MISTAKES = {
    signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT, signal.SIGSYS,
}  # fmt: skip


class Action(StrEnum):
    """What the supervisor does with the worker."""

    DONE = "done"
    RESTART = "restart"
    STOP = "stop"  # the run cannot go on


class Decision(NamedTuple):
    """The answer to an end, with a sentence for people."""

    action: Action
    reason: str
    delay_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Exited:
    """A process that was seen to end, and what is known of it."""

    worker: str
    instance: str
    status: int  # exit status, or minus the number of the signal
    seen_s: float  # monotonic
    excuse: str = ""  # why it is no failure of its own; "": it is
    died_at: str = ""  # the crash point that it was killed at, if it was armed
    was_replaced: bool = False  # its successor had been started before
    uptime_s: float = 0.0  # for people
    committed: bool = False  # something of its work, since it started
    has_started: bool = False  # it reported that it does more than to start
    cause: str = ""  # its last error, in a line
    is_disk_full: bool = False


class RestartPolicy:
    """The memory of one worker's failures.

    A failure is quick if the worker committed nothing since it started: what works for a while and
    fails is started again for ever, what never works is given up. Who was killed, or crashed
    once it had started, did not fail: the limit on a run without a step is for those.

    Args:
        room_s: how long room on a full disk is waited for; 0: for ever.
    """

    def __init__(self, worker: str, transactional_id: str, room_s: float = 0.0) -> None:
        self._worker = worker
        self._transactional_id = transactional_id
        self._room_s = room_s
        self._fenced_at_s: float | None = None
        self._owned_since_s: float | None = None
        self._full_since_s: float | None = None
        self._num_deaths = 0  # in a row, with nothing committed
        self._num_quick = 0  # of them, failures

    def after(
        self, end: Exited, *, may_leave: bool = True, is_owner_gone: bool = False
    ) -> Decision:
        """Decide.

        Args:
            may_leave: whether a good end is in order; else somebody sent a SIGTERM from outside.
            is_owner_gone: a trainer gave way to an owner that we have reaped since.
        """
        status, how = end.status, f"{self._worker} {described(end.status)}"
        if (status == Exit.DONE and not may_leave) or (
            status == Exit.OWNER_ALIVE and is_owner_gone
        ):
            but = "the run goes on" if status == Exit.DONE else "that one has ended"
            return Decision(Action.RESTART, f"{how}, but {but}", BACK_OFF_S)
        if end.excuse and status not in (Exit.DONE, Exit.OWNER_ALIVE, Exit.CONFIG):
            delay_s = FENCED_PAUSE_S if status == Exit.FENCED else 0.0
            return Decision(Action.RESTART, f"{self._worker} {end.excuse}", delay_s)
        how += f" after {end.uptime_s:.1f} s" + (f": {end.cause}" if end.cause else "")
        if status in (Exit.DONE, Exit.CONFIG):
            return Decision(Action.DONE if status == Exit.DONE else Action.STOP, how)
        if status in (Exit.FENCED, Exit.OWNER_ALIVE):
            return (self._fenced if status == Exit.FENCED else self._owned)(how, end.seen_s)
        self._owned_since_s = None
        if end.committed:
            self._num_deaths = self._num_quick = 0
            self._full_since_s = None
            return Decision(Action.RESTART, how)
        self._num_deaths += 1
        return self._full(how, end.seen_s) if end.is_disk_full else self._failed(how, end)

    def _failed(self, how: str, end: Exited) -> Decision:
        self._full_since_s = None
        if end.status > 0 or (not end.has_started and -end.status in _OWN_MISTAKES):
            self._num_quick += 1
        if self._num_quick >= QUICK_LIMIT:
            reason = f"{how}, the {QUICK_LIMIT}rd time in a row without committing anything"
            return Decision(Action.STOP, reason)
        return self._again(how)

    def _again(self, how: str) -> Decision:
        delay_s = min(LONGEST_BACK_OFF_S, BACK_OFF_S * 2 ** (min(self._num_deaths, 9) - 1))
        return Decision(Action.RESTART, how, delay_s)

    def _full(self, how: str, now_s: float) -> Decision:
        self._full_since_s = since_s = self._full_since_s or now_s
        waited_s = now_s - since_s
        if 0 < self._room_s <= waited_s:
            return Decision(
                Action.STOP, f"{how}; there was no room on the disk for {waited_s:.0f} s"
            )
        limit = f", at most {self._room_s - waited_s:.0f} s" if self._room_s else ""
        return self._again(f"{how}; waiting for room on the disk{limit}")

    def _owned(self, how: str, now_s: float) -> Decision:
        """The owner may be of an `up` that was killed: it drains, and is gone in a while."""
        self._owned_since_s = self._owned_since_s or now_s
        if now_s - self._owned_since_s >= OWNER_S:
            return Decision(Action.STOP, how)
        return Decision(Action.RESTART, how, FENCED_PAUSE_S)

    def _fenced(self, how: str, now_s: float) -> Decision:
        before, self._fenced_at_s = self._fenced_at_s, now_s
        if before is not None and now_s - before < FENCED_WINDOW_S:
            reason = (
                f"{how}, twice within {FENCED_WINDOW_S / 60:.0f} minutes: something else uses the "
                f"transactional id {self._transactional_id!r} of this run; is it up twice?"
            )
            return Decision(Action.STOP, reason)
        return Decision(Action.RESTART, how, FENCED_PAUSE_S)


def described(status: int) -> str:
    """An exit status in words."""
    if status < 0:
        try:
            return f"was ended by {signal.Signals(-status).name}"
        except ValueError:
            return f"was ended by signal {-status}"
    return _WORDS.get(status, f"failed (exit {status})")


_WORDS: dict[int, str] = {
    Exit.DONE: "is done",
    Exit.FENCED: "was fenced (exit 75)",
    Exit.OWNER_ALIVE: "found another owner alive (exit 76)",
    Exit.CONFIG: "refused its configuration (exit 78)",
}
