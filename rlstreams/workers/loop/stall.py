"""End of a role that is stuck, and its last words.

A waiting role is not stuck: another one is, and exiting would not help. It logs the thing it waits
for, once per `stall_s`. A role that reports working or pulling, and finishes nothing for longer
than that may take, is stuck itself: it names its current work and exits, so that its supervisor
restarts it. So does one whose tick never returns, because it cannot even report.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from types import FrameType, TracebackType
from typing import Self

from rlstreams.streams.log.errors import DeadlineError
from rlstreams.streams.views.stalls import StallLimits
from rlstreams.streams.workers import PROGRESS
from rlstreams.workers.config.across import judging
from rlstreams.workers.config.reward import judging_s
from rlstreams.workers.config.run import RunConfig

# A clock that is set back by more ends the process. The Kafka client waits until times of the day
# (`cnd_timedwait` of C11): its waits, those for a heartbeat included, last as much longer.
SET_BACK_S = 10.0
TICK_S = 1.0  # of a longer pause between two ticks no more counts: we stood, or the machine slept
STACK_LINES = 6
SETTLE_S = 35.0  # a predecessor's open transaction: its timeout, and the broker's clean-up
_STUCK = 1  # the status of a failure: start again


class StuckError(DeadlineError):
    """This worker finished nothing for longer than its work may take."""


def limits_of(config: RunConfig) -> StallLimits:
    """Limits for the work of a run: for its roles, for `up` and for the monitor."""
    sample_s = config.rollout.sample_deadline_s + judging_s(judging(config))
    return StallLimits(
        groups_per_step=config.trainer.groups_per_step,
        stall_s=config.deadlines.stall_s,
        sample_s=sample_s * config.rollout.max_attempts + config.outcome.late_s,
        pull_s=config.weights.pull_deadline_s,
        save_s=config.deadlines.checkpoint_s,
        shifts_s=max((device.others_s for device in config.devices), default=0.0),
    )


def tick_limit_s(config: RunConfig) -> float:
    """Longest time of a tick, which may commit and wait for a predecessor's commit; 0: no limit."""
    deadlines = config.deadlines
    if not deadlines.stall_s:
        return 0.0
    return max(deadlines.stall_s, 2 * (deadlines.commit_s + SETTLE_S))


class StallClock:
    """Seconds that count since a mark of progress changed. Pure: times are given."""

    def __init__(self) -> None:
        self._mark: object = None
        self._last_s: float | None = None
        self.waited_s = 0.0

    def tick(self, now_s: float, mark: object, *, counts: bool = True) -> float:
        """Return the seconds that count so far; a new `mark` begins at 0."""
        passed_s = 0.0 if self._last_s is None else min(TICK_S, now_s - self._last_s)
        self._last_s = now_s
        if mark != self._mark:
            self._mark, self.waited_s = mark, 0.0
        elif counts:
            self.waited_s += passed_s
        return self.waited_s


class StuckWatch:
    """Follows the reported states of one worker. Pure: times are given."""

    def __init__(self, worker: str, role: str, limits: StallLimits) -> None:
        self._worker = worker
        self._role = role
        self._limits = limits
        self._clock = StallClock()
        self._next_news_s = limits.stall_s

    def look(
        self, now_s: float, state: str, detail: str, counters: Mapping[str, float]
    ) -> str | None:
        """Text to log when this worker waited too long, or None.

        Raises:
            StuckError: it is stuck itself.
        """
        seen = (state, tuple(counters.get(name, 0.0) for name in PROGRESS))
        stood_s = self._clock.tick(now_s, seen)
        if not stood_s:
            self._next_news_s = self._limits.stall_s
            return None
        limit_s = self._limits.own(self._role, state)
        said = " ".join(filter(None, (state, detail)))
        if limit_s is not None and stood_s >= limit_s:
            raise StuckError(
                f"{self._worker} says {said!r} and has done nothing for {stood_s:.0f} s, "
                f"its limit is {limit_s:g} s: it ends, to be started again"
            )
        stall_s = self._limits.stall_s
        if stall_s and state == "waiting" and stood_s >= self._next_news_s:
            self._next_news_s += stall_s
            return f"{self._worker} is {said} for {stood_s:.0f} s"
        return None


class Watchdog:
    """Ends the process when its loop does not come round, or its host's clock is set back; a thread
    of its own. Use in a `with`.

    Args:
        limit_s: longest tick; 0: no watch.
        on_beat: called with each beat.
        minds_clock: whether a clock that is set back ends the process.
    """

    def __init__(
        self, limit_s: float, on_beat: Callable[[], None] = lambda: None, minds_clock: bool = True
    ) -> None:
        self._limit_s, self._minds_clock = limit_s, minds_clock
        self._on_beat = on_beat
        self._thread = threading.current_thread()
        self._beats = 0
        self._over = threading.Event()

    def beat(self) -> None:
        """Note that a tick begins, or that a long one has come forward."""
        self._beats += 1
        self._on_beat()

    def __enter__(self) -> Self:
        if self._limit_s:
            threading.Thread(target=self._watch, name="watchdog", daemon=True).start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._over.set()

    def _watch(self) -> None:
        clock = StallClock()
        clock.tick(time.monotonic(), self._beats)
        ahead_s = time.time() - time.monotonic()
        while not self._over.wait(min(TICK_S, self._limit_s / 4)):
            if (stood_s := clock.tick(time.monotonic(), self._beats)) >= self._limit_s:
                self._end(
                    f"one tick of this worker takes {stood_s:.0f} s, its limit is "
                    f"{self._limit_s:g} s"
                )
            was_s, ahead_s = ahead_s, time.time() - time.monotonic()
            if (back_s := was_s - ahead_s) >= SET_BACK_S and self._minds_clock:
                self._end(
                    f"the clock of this host was set back by {back_s:.0f} s, and what the Kafka "
                    "client waits for would come as much later"
                )

    def _end(self, why: str) -> None:
        frame = sys._current_frames().get(self._thread.ident or 0)
        sys.stderr.write(
            f"StuckError: {why}: it ends, to be started again\nIt was at:\n{_where(frame)}"
        )
        sys.stderr.flush()
        os._exit(_STUCK)


def _where(frame: FrameType | None) -> str:
    return "".join(traceback.format_stack(frame)[-STACK_LINES:]) if frame else "(gone)\n"
