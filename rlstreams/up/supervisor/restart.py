"""The decision to restart a worker that ended, or to stop the run. Pure.

Statuses are those of `workers.loop.runtime.Exit`, as infra/docs/operating.md explains them to any
supervisor; a negative one is the signal that killed the process.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

from rlstreams.streams.process.cause import died
from rlstreams.streams.process.keeper import FIRST_S, Ended, Keeper, Limits, RestartVerdict
from rlstreams.workers.loop.runtime import Exit

FENCED_PAUSE_S = 3.0
FENCED_WINDOW_S = 600.0
QUICK_LIMIT = 3
SAME_LIMIT = 2  # starts that take minutes and fail with the same words: a third would too
OWNER_S = 60.0  # for a trainer of an `up` that was killed to drain
# Signals that the kernel sends a process for its own mistake; all others come from outside.
_OWN_MISTAKES = {
    signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT, signal.SIGSYS,
}  # fmt: skip


class Action(StrEnum):
    """Action of the supervisor after a worker ended."""

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
    """A process that was seen to end: its status, its uptime, its work, the cause."""

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
    is_out_of_memory: bool = False  # the kernel killed it


class RestartPolicy:
    """Decides by a worker's exit status; a `Keeper` counts its failures in a row.

    Headway is a commit since its start. A worker that was killed, or crashed once it had
    started, did not fail: the limit on a run without a step is for such workers.

    Args:
        room_s: how long room on a full disk is waited for; 0: for ever.
        starts_slowly: whether a start takes minutes, as a model server's: it is given up at the
            second one that fails with the same words.
        folder: the run's, where a worker writes.
    """

    def __init__(
        self,
        worker: str,
        transactional_id: str,
        room_s: float = 0.0,
        *,
        starts_slowly: bool = False,
        folder: Path = Path(),
    ) -> None:
        self._worker = worker
        self._folder = folder
        self._transactional_id = transactional_id
        self._room_s = room_s
        self._keeper = Keeper(Limits(failures=QUICK_LIMIT, first_s=FIRST_S, room_s=room_s))
        self._starts_slowly = starts_slowly
        self._same: tuple[str, int] = ("", 0)  # words of the last failed start; how often in a row
        self._fenced_at_s: float | None = None
        self._owned_since_s: float | None = None

    def after(
        self, end: Exited, *, may_leave: bool = True, is_owner_gone: bool = False
    ) -> Decision:
        """Decide what follows the end of a process.

        Args:
            may_leave: whether exit 0 is expected; if not, a SIGTERM came from outside.
            is_owner_gone: a trainer gave way to an owner that we have reaped since.
        """
        status, how = end.status, f"{self._worker} {described(end.status)}"
        # The keeper counts every end, whatever is decided: committed work ends a row of failures.
        verdict = self._keeper.ended(_ended(end), end.seen_s, has_headway=end.committed)
        self._count_same(end)
        if (status == Exit.DONE and not may_leave) or (
            status == Exit.OWNER_ALIVE and is_owner_gone
        ):
            but = "the run goes on" if status == Exit.DONE else "that one has ended"
            return Decision(Action.RESTART, f"{how}, but {but}", FIRST_S)
        if end.excuse and status not in (Exit.DONE, Exit.OWNER_ALIVE, Exit.CONFIG):
            delay_s = FENCED_PAUSE_S if status == Exit.FENCED else 0.0
            return Decision(Action.RESTART, f"{self._worker} {end.excuse}", delay_s)
        how += f" after {end.uptime_s:.1f} s" + (f": {end.cause}" if end.cause else "")
        if status in (Exit.DONE, Exit.CONFIG):
            return Decision(Action.DONE if status == Exit.DONE else Action.STOP, how)
        if status in (Exit.FENCED, Exit.OWNER_ALIVE):
            return (self._fenced if status == Exit.FENCED else self._owned)(how, end.seen_s)
        self._owned_since_s = None
        if self._starts_slowly and self._same[1] >= SAME_LIMIT:
            return Decision(Action.STOP, f"{how}, {SAME_LIMIT} starts in a row, none served")
        return self._followed(how, verdict, is_disk_full=end.is_disk_full)

    def _count_same(self, end: Exited) -> None:
        """Count starts that fail with the same words of the server itself, not of a signal or the
        broker; an end that was meant counts as nothing."""
        kind = _ended(end)
        if end.committed or kind is Ended.NO_ROOM:
            self._same = ("", 0)
        elif kind is Ended.FAILED:
            before, times = self._same
            is_server_s = end.cause.startswith("ServerEndedError") and "ended by" not in end.cause
            self._same = (end.cause, times + 1 if is_server_s and end.cause == before else 1)

    def _followed(self, how: str, verdict: RestartVerdict, *, is_disk_full: bool) -> Decision:
        if not verdict.is_over:
            if is_disk_full:
                left_s = self._room_s - verdict.room_s
                limit = f", at most {left_s:.0f} s" if self._room_s else ""
                how += f"; waiting for room on the disk under {self._folder}{limit}"
            return Decision(Action.RESTART, how, verdict.delay_s)
        if is_disk_full:
            why = f"; there was no room on the disk under {self._folder} for {verdict.room_s:.0f} s"
        else:
            why = f", the {QUICK_LIMIT}rd time in a row within {verdict.row_s:.0f} s"
            why += " without committing anything"
        return Decision(Action.STOP, how + why)

    def _owned(self, how: str, now_s: float) -> Decision:
        """Wait for an owner that may be of a killed `up`: it drains, and is gone in a while."""
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


def _ended(end: Exited) -> Ended:
    if end.excuse or end.status in (Exit.DONE, Exit.FENCED, Exit.OWNER_ALIVE, Exit.CONFIG):
        return Ended.EXCUSED
    if end.is_disk_full:
        return Ended.NO_ROOM
    # It will need as much memory again: unlike any other kill, this one is its own failure.
    is_own = end.status > 0 or end.is_out_of_memory
    is_own |= not end.has_started and -end.status in _OWN_MISTAKES
    return Ended.FAILED if is_own else Ended.KILLED


def described(status: int) -> str:
    """An exit status of a worker in words."""
    return _WORDS.get(status) or died(status)


_WORDS: dict[int, str] = {
    Exit.DONE: "is done",
    Exit.FENCED: "was fenced (exit 75)",
    Exit.OWNER_ALIVE: "found another owner alive (exit 76)",
    Exit.CONFIG: "refused its configuration (exit 78)",
}
