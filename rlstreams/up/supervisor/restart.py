"""What to do about a worker that ended: pure; the clock is passed in.

Statuses are those of `workers.loop.runtime.Exit`, as infra/docs/operating.md explains them to any
supervisor; a negative one is the signal that killed the process.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass
from enum import StrEnum

from rlstreams.workers.loop.runtime import Exit

FENCED_PAUSE_S = 3.0
FENCED_WINDOW_S = 600.0
QUICK_LIMIT = 3
BACK_OFF_S = 0.5  # doubles with every quick failure in a row


class Action(StrEnum):
    """What the supervisor does with the worker."""

    DONE = "done"
    RESTART = "restart"
    STOP = "stop"  # the run cannot go on


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The answer to an end, with a sentence for people."""

    action: Action
    reason: str
    delay_s: float = 0.0


class RestartPolicy:
    """The memory of one worker's failures.

    A failure is quick if the worker committed nothing since it started: what works for a while and
    fails is started again for ever, what never works is given up.
    """

    def __init__(self, worker: str, transactional_id: str) -> None:
        self._worker = worker
        self._transactional_id = transactional_id
        self._fenced_at_s: float | None = None
        self._num_quick = 0

    def excused(self, status: int, why: str) -> Decision:
        """We ended the worker, e.g. `why` = "was killed as asked": no failure of its own."""
        delay_s = FENCED_PAUSE_S if status == Exit.FENCED else 0.0
        return Decision(action=Action.RESTART, reason=f"{self._worker} {why}", delay_s=delay_s)

    def left(self, status: int) -> Decision:
        """The worker ended well while the run goes on, as after a SIGTERM from outside."""
        reason = f"{self._worker} {described(status)}, but the run goes on"
        return Decision(action=Action.RESTART, reason=reason, delay_s=BACK_OFF_S)

    def owner_gone(self, status: int) -> Decision:
        """The trainer gave way to an owner that we have reaped since: nobody is alive."""
        reason = f"{self._worker} {described(status)}, but that one has ended"
        return Decision(action=Action.RESTART, reason=reason, delay_s=BACK_OFF_S)

    def ended(self, status: int, *, now_s: float, uptime_s: float, committed: bool) -> Decision:
        """Decide.

        Args:
            status: exit status, or minus the number of the signal.
            now_s: any monotonic clock.
            uptime_s: for people.
            committed: whether it committed anything of its work since it started.
        """
        how = f"{self._worker} {described(status)} after {uptime_s:.1f} s"
        if status == Exit.DONE:
            return Decision(action=Action.DONE, reason=how)
        if status == Exit.FENCED:
            return self._fenced(how, now_s)
        if status in (Exit.OWNER_ALIVE, Exit.CONFIG):
            return Decision(action=Action.STOP, reason=how)
        self._num_quick = 0 if committed else self._num_quick + 1
        if self._num_quick >= QUICK_LIMIT:
            reason = f"{how}, the {QUICK_LIMIT}rd time in a row without committing anything"
            return Decision(action=Action.STOP, reason=reason)
        delay_s = BACK_OFF_S * 2 ** (self._num_quick - 1) if self._num_quick else 0.0
        return Decision(action=Action.RESTART, reason=how, delay_s=delay_s)

    def _fenced(self, how: str, now_s: float) -> Decision:
        before, self._fenced_at_s = self._fenced_at_s, now_s
        if before is not None and now_s - before < FENCED_WINDOW_S:
            reason = (
                f"{how}, twice within {FENCED_WINDOW_S / 60:.0f} minutes: something else uses the "
                f"transactional id {self._transactional_id!r} of this run; is it up twice?"
            )
            return Decision(action=Action.STOP, reason=reason)
        return Decision(action=Action.RESTART, reason=how, delay_s=FENCED_PAUSE_S)


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
