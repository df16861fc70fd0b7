"""Keeps the embedded broker of a run alive, in a thread of its own.

A restart takes a few seconds, longer on a busy machine. Meanwhile the loop of `up` keeps running:
it reaps and drains, and even while it waits for the broker's answer, the restart is in progress.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from signal import SIGKILL, Signals
from typing import Self

from rlstreams.streams.broker.embedded import START_S, EmbeddedBroker
from rlstreams.streams.log.errors import BrokerError, DeadlineError, StreamsError
from rlstreams.streams.process.cause import is_about_room, is_full
from rlstreams.streams.process.keeper import FIRST_S, Ended, Keeper, Limits

CHECK_S = 1.0
AGAIN_S = 0.2
STEADY_S = 60.0  # a broker that stood for so long works
QUICK_LIMIT = 5  # failures in a row
RETURN_S = START_S + 10.0  # one start, at most
SIGNALLED = 128  # plus the signal: how a JVM ends that was asked to
CLOSE_S = 60.0  # longer than the part of a start that cannot be cut short


class BrokerKeeper:
    """Starts the broker again when it died; gives up when that does not help. Use in a `with`.

    A start that fails counts as a failure, as does a broker that ends by itself soon; one that is
    killed while it serves does not. They are in a row as long as nothing came of it in between
    (`made_headway`). The thread prints nothing: `tick` does, in the thread that owns `say`.

    Args:
        room_s: how long room on a full disk is waited for; 0: for ever.
    """

    def __init__(
        self,
        broker: EmbeddedBroker,
        say: Callable[[str], None],
        check_s: float = CHECK_S,
        room_s: float = 0.0,
    ) -> None:
        self._broker = broker
        self._say = say
        self._check_s = check_s
        self._room_s = room_s
        self._policy = Keeper(
            Limits(failures=QUICK_LIMIT, first_s=FIRST_S, steady_s=STEADY_S, room_s=room_s)
        )
        self._has_headway = False
        self._was_killed_by_us = False
        self._why_restart = ""
        self._lock = threading.Lock()  # over looking and killing, never over a start
        self._news: deque[str] = deque()
        self._problem: Exception | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="broker-keeper", daemon=True)
        self.is_away = False  # it died, and does not serve yet
        self.started_s = time.monotonic()  # since when it serves, or did until it died

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        """A start that is under way is ended: nobody else would stop that broker."""
        self._over.set()
        until_s = time.monotonic() + CLOSE_S
        self._thread.join(AGAIN_S)
        while self._thread.is_alive() and time.monotonic() < until_s:
            self.kill()
            self._thread.join(AGAIN_S)

    def kill(self) -> bool:
        """Send SIGKILL to the broker, also to one that starts; False if none runs."""
        with self._lock:
            is_sent = self._send(SIGKILL)
            self._was_killed_by_us = self._was_killed_by_us or is_sent
            return is_sent

    def restart(self, why: str) -> None:
        """Have the broker stopped cleanly and started again, in the keeper's thread."""
        self._why_restart = why

    def signal(self, number: Signals) -> bool:
        """Send a signal to the broker; False if none runs."""
        with self._lock:
            return self._send(number)

    def made_headway(self) -> None:
        """The run got further with this broker: what fails from here on is another row."""
        self._has_headway = not self.is_away

    def tick(self) -> None:
        """Say what happened; never waits.

        Raises:
            BrokerError: no room on its disk in time, or it fails again and again.
            StreamsError: it cannot start.
        """
        while self._news:
            self._say(self._news.popleft())
        if self._problem is not None:
            raise self._problem

    @property
    def lacks_room(self) -> bool:
        """Whether the broker is away because its disk is full, or is about to be."""
        return self._policy.lacks_room or is_full(self._broker.folder)

    def _send(self, number: Signals) -> bool:
        state = self._broker.status()
        if state is None:
            return False
        try:
            os.kill(state.pid, number)
        except ProcessLookupError:  # it ended just now
            return False
        return True

    def _keep(self) -> None:
        while not self._over.wait(self._check_s):
            try:
                if self._broker.status() is None:
                    self._bring_back()
                elif self._broker.lost_a_coordinator():
                    self._stop("it lost the coordinator of a group")
                elif self._why_restart:
                    self._stop(self._why_restart)
            except (StreamsError, OSError) as err:
                self._problem = err
                return

    def _stop(self, why: str) -> None:
        """Stop the broker cleanly; the next one loads all groups anew."""
        self._why_restart = ""
        self._news.append(f"restarting the broker once: {why}")
        with self._lock:
            self._was_killed_by_us = True
        self._broker.stop()

    def _bring_back(self) -> None:
        """Start it until it serves, or has failed too often."""
        died_s = time.monotonic()
        self.is_away = True
        lived_s = died_s - self.started_s
        if self._ended_by_itself():
            why = f"it ended after {lived_s:.0f} s:\n{self._broker.log_tail()}"
            delay_s = self._ended(Ended.FAILED, why, lived_s)
        else:
            delay_s = self._ended(Ended.EXCUSED, "", lived_s)
        self._news.append("the broker died; starting it again")
        while not self._over.wait(delay_s):
            try:
                state = self._broker.attach_or_start()
            except (StreamsError, OSError) as err:
                if self._over.is_set():
                    return
                how = Ended.EXCUSED if self._was_killed() else Ended.FAILED
                delay_s = self._ended(how, f"its start failed: {err}")
                continue
            self.started_s = time.monotonic()
            self.is_away = False
            self._policy.has_room()
            self._news.append(
                f"the broker died; started again, it serves {state.bootstrap} as before "
                f"(after {self.started_s - died_s:.0f} s)"
            )
            return

    def _was_killed(self) -> bool:
        """Whether we killed it since the last call."""
        with self._lock:
            by_us, self._was_killed_by_us = self._was_killed_by_us, False
        return by_us

    def _ended_by_itself(self) -> bool:
        """Whether nobody killed it, as far as is known."""
        by_us, status = self._was_killed(), self._broker.last_status
        return not by_us and status is not None and 0 <= status <= SIGNALLED

    def _ended(self, how: Ended, why: str, lived_s: float = 0.0) -> float:
        """Note an end, or a start that failed, and return the pause before the next start, seconds.
        A full disk is not counted as a failure of the broker.

        Raises BrokerError: it was one too many, or the disk has been full for too long.
        """
        folder = self._broker.folder
        if how is Ended.FAILED and (
            self._broker.died_of_full_disk() or is_about_room(why) or is_full(folder)
        ):
            how = Ended.NO_ROOM
        has_headway, self._has_headway = self._has_headway, False
        verdict = self._policy.ended(
            how, time.monotonic(), has_headway=has_headway, lived_s=lived_s
        )
        again = f"again in {verdict.delay_s:g} s"
        if how is Ended.NO_ROOM:
            if verdict.is_over:
                raise BrokerError(
                    f"the disk under {folder} is full, and there was no room for "
                    f"{verdict.room_s:.0f} s: {why}"
                )
            limit = f", at most {self._room_s:g} s" if self._room_s else ""
            self._news.append(
                f"the disk under {folder} is full: the broker waits for room{limit}; {again}"
            )
        elif verdict.failures and how is Ended.FAILED:
            if verdict.is_over:
                raise BrokerError(
                    f"the broker failed {QUICK_LIMIT} times in a row within "
                    f"{verdict.row_s:.0f} s; the last: {why}"
                )
            first = why.splitlines()[0]
            count = f"{verdict.failures} of {QUICK_LIMIT}"
            self._news.append(f"the broker failed ({count}), {first} {again}")
        return verdict.delay_s


def outlasting(attempt: Callable[[], None], keeper: BrokerKeeper | None) -> None:
    """Make `attempt`, again if the broker died meanwhile and its keeper brings it back.

    Args:
        attempt: may be made again.
        keeper: None: the broker is not ours, and one attempt is all.

    Raises:
        StreamsError: the keeper gave up, the broker waits for room on its disk, or the attempt
            still fails after `RETURN_S`.
    """
    until_s = time.monotonic() + RETURN_S
    while True:
        try:
            if keeper is not None and keeper.is_away:
                raise BrokerError(f"the broker has not come back within {RETURN_S:g} s")  # noqa: TRY301
            attempt()
        except (BrokerError, DeadlineError):
            if keeper is None or time.monotonic() > until_s:
                raise
            keeper.tick()
            if keeper.lacks_room:
                raise BrokerError("the broker's disk is full: its log cannot be read now") from None
            time.sleep(AGAIN_S)
        else:
            return
