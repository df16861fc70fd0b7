"""Keeps the embedded broker of a run alive."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

from streams.broker import EmbeddedBroker
from streams.errors import BrokerError

CHECK_S = 1.0
QUICK_S = 60.0  # a broker that lived shorter than this failed quickly
QUICK_LIMIT = 3


class BrokerKeeper:
    """Starts the broker again when it died; gives up when that does not help."""

    def __init__(
        self, broker: EmbeddedBroker, say: Callable[[str], None], check_s: float = CHECK_S
    ) -> None:
        self._broker = broker
        self._say = say
        self._check_s = check_s
        self._next_check_s = 0.0
        self._started_s = time.monotonic()
        self._num_quick = 0
        self._was_killed_by_us = False
        self.last_death_seen_s = 0.0  # monotonic

    def kill(self) -> bool:
        """SIGKILL, by somebody's wish; False if none runs."""
        self._was_killed_by_us = self.signal(signal.SIGKILL)
        return self._was_killed_by_us

    def signal(self, number: signal.Signals) -> bool:
        """Send a signal to the broker; False if none runs."""
        state = self._broker.status()
        if state is None:
            return False
        os.kill(state.pid, number)
        return True

    def tick(self) -> None:
        """Check every `check_s`; a restart takes some seconds.

        Raises:
            BrokerError: its disk is full, it cannot start, or it dies again and again.
        """
        now_s = time.monotonic()
        if now_s < self._next_check_s:
            return
        self._next_check_s = now_s + self._check_s
        if self._broker.status() is not None:
            return
        self.last_death_seen_s = now_s
        tail = self._broker.log_tail()
        if self._broker.died_of_full_disk():
            raise BrokerError(f"the disk under {self._broker.folder} is full:\n{tail}")
        is_quick = now_s - self._started_s < QUICK_S and not self._was_killed_by_us
        self._was_killed_by_us = False
        self._num_quick = self._num_quick + 1 if is_quick else 0
        if self._num_quick >= QUICK_LIMIT:
            raise BrokerError(f"the broker died {QUICK_LIMIT} times in a row:\n{tail}")
        state = self._broker.start()
        self._started_s = time.monotonic()
        self._say(f"the broker died; started again, it serves {state.bootstrap} as before")
