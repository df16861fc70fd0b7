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
from types import TracebackType
from typing import Self

from rlstreams.streams.broker.embedded import START_S, EmbeddedBroker
from rlstreams.streams.log.errors import BrokerError, DeadlineError, StreamsError

CHECK_S = 1.0
AGAIN_S = 0.2
QUICK_S = 60.0  # a broker that lived shorter than this failed quickly
QUICK_LIMIT = 3
RETURN_S = START_S + 10.0  # a dead broker serves again within this, or the keeper gives up


class BrokerKeeper:
    """Starts the broker again when it died; gives up when that does not help. Use in a `with`.

    The thread tells nobody: `tick` does, in the thread of whoever owns `say`.
    """

    def __init__(
        self, broker: EmbeddedBroker, say: Callable[[str], None], check_s: float = CHECK_S
    ) -> None:
        self._broker = broker
        self._say = say
        self._check_s = check_s
        self._num_quick = 0
        self._was_killed_by_us = False
        self._is_starting = False
        self._lock = threading.Lock()  # over looking and killing, never over a start
        self._news: deque[str] = deque()
        self._problem: Exception | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="broker-keeper", daemon=True)
        self.started_s = time.monotonic()  # since when it serves, or did until it died
        self.last_death_seen_s = 0.0  # monotonic

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._over.set()
        # A start that has begun is waited for: nobody else would stop that broker.
        self._thread.join(RETURN_S)

    def kill(self) -> bool:
        """SIGKILL, by somebody's wish; False if none runs."""
        with self._lock:
            is_sent = self._send(SIGKILL)
            self._was_killed_by_us = self._was_killed_by_us or is_sent
            return is_sent

    def signal(self, number: Signals) -> bool:
        """Send a signal to the broker; False if none runs."""
        with self._lock:
            return self._send(number)

    def tick(self) -> None:
        """Say what happened; never waits.

        Raises:
            BrokerError: the broker's disk is full, or it dies again and again.
            StreamsError: it cannot start.
        """
        while self._news:
            self._say(self._news.popleft())
        if self._problem is not None:
            raise self._problem

    def _send(self, number: Signals) -> bool:
        state = None if self._is_starting else self._broker.status()
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
                if self._died():
                    self._restart()
            except (StreamsError, OSError) as err:
                self._problem = err
                return

    def _died(self) -> bool:
        """Whether it did, and is worth another start."""
        now_s = time.monotonic()
        with self._lock:
            if self._broker.status() is not None:
                return False
            self._is_starting = True
            was_killed, self._was_killed_by_us = self._was_killed_by_us, False
        self.last_death_seen_s = now_s
        tail = self._broker.log_tail()
        if self._broker.died_of_full_disk():
            raise BrokerError(f"the disk under {self._broker.folder} is full:\n{tail}")
        is_quick = now_s - self.started_s < QUICK_S and not was_killed
        self._num_quick = self._num_quick + 1 if is_quick else 0
        if self._num_quick >= QUICK_LIMIT:
            raise BrokerError(f"the broker died {QUICK_LIMIT} times in a row:\n{tail}")
        return True

    def _restart(self) -> None:
        self._news.append("the broker died; starting it again")
        state = self._broker.start()
        self.started_s = time.monotonic()
        self._is_starting = False
        took_s = self.started_s - self.last_death_seen_s
        self._news.append(
            f"the broker died; started again, it serves {state.bootstrap} as before "
            f"(after {took_s:.0f} s)"
        )


def outlasting(attempt: Callable[[], None], keeper: BrokerKeeper | None) -> None:
    """Make `attempt`, again if the broker died meanwhile and its keeper brings it back.

    Args:
        attempt: may be made again.
        keeper: None: the broker is not ours, and one attempt is all.

    Raises:
        StreamsError: the keeper gave up, or the attempt fails `RETURN_S` after its first failure.
    """
    until_s = 0.0
    while True:
        try:
            attempt()
        except (BrokerError, DeadlineError):
            now_s = time.monotonic()
            until_s = until_s or now_s + RETURN_S
            if keeper is None or now_s > until_s:
                raise
            keeper.tick()
            time.sleep(AGAIN_S)
        else:
            return
